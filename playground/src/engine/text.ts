import type { Encoded } from "./types";

/** Return the tokens of a text. Characters outside the vocabulary are left out, and named. */
export function encode(vocabulary: string[], text: string): Encoded {
  const tokenOf = new Map(vocabulary.map((character, token) => [character, token]));
  const tokens = new Uint8Array(text.length);
  const offsets = new Uint32Array(text.length);
  const unknown = new Set<string>();
  let [n, offset] = [0, 0];
  for (const character of text) {
    const token = tokenOf.get(character);
    if (token === undefined) unknown.add(character);
    else {
      tokens[n] = token;
      offsets[n++] = offset;
    }
    offset += character.length;
  }
  return { tokens: tokens.slice(0, n), offsets: offsets.slice(0, n), unknown: [...unknown] };
}
