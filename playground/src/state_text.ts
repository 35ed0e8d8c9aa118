/**
 * A writing as text, to be copied: model.last.seed.draws.since.states.checksum, where the states are the
 * float32 of all layers, little-endian, in base64. It is all that the next characters depend on.
 */

import type { ModelInfo, Writing } from "./engine/types";
import { MODELS } from "./view";

const FOREIGN = "This is not a state that was copied from this page, or not all of it.";
/** Largest seed; the counts of a text stay far below it. */
const MOST = 2 ** 32 - 1;
/** Both cells keep their states within ±1, but for rounding. */
const BOUND = 1 + 1e-6;

/** FNV-1a, 32 bits: tells a text that was cut or changed. */
function checksum(text: string): string {
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16).padStart(8, "0");
}

export function packWriting(info: ModelInfo, writing: Writing): string {
  let bytes = "";
  for (const layer of writing.carry) {
    for (const byte of new Uint8Array(layer.buffer, layer.byteOffset, layer.byteLength)) {
      bytes += String.fromCharCode(byte);
    }
  }
  const { last, seed, draws, sinceReset } = writing;
  const body = [info.name, last, seed, draws, sinceReset, btoa(bytes)].join(".");
  return `${body}.${checksum(body)}`;
}

/** The writing of such a text. Throws an Error whose message is one sentence for the reader. */
export function unpackWriting(info: ModelInfo, text: string): Writing {
  const packed = text.replace(/\s/g, "");
  const found = /^(\w+)\.(\d{1,10})\.(\d{1,10})\.(\d{1,10})\.(\d{1,10})\.((?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?)\.(\w{8})$/.exec(packed);
  if (!found) throw new Error(FOREIGN);
  const [, name, last, seed, draws, sinceReset, states, sum] = found;
  if (checksum(packed.slice(0, -9)) !== sum) {
    throw new Error("This state was changed after it was copied: its checksum is wrong.");
  }
  if (!MODELS.some((known) => known === name)) throw new Error(FOREIGN);
  if (name !== info.name) {
    throw new Error(`This state is one of ${name}; select that model to continue from it.`);
  }
  const bytes = Uint8Array.from(atob(states), (character) => character.charCodeAt(0));
  if (bytes.length % 4) throw new Error(FOREIGN);
  if (bytes.length !== 4 * info.numLayers * info.hiddenDim) {
    throw new Error(`This state has ${bytes.length / 4} numbers; ${name} has ${info.numLayers * info.hiddenDim}.`);
  }
  const values = new Float32Array(bytes.buffer);
  const wrong = values.find((value) => !(Math.abs(value) <= BOUND));
  if (wrong !== undefined) throw new Error(`This state has the number ${wrong}; all are from −1 to 1.`);
  const V = info.vocabulary.length;
  if (+last >= V) throw new Error(`This state's last character is ${last}; the model's are 0 to ${V - 1}.`);
  for (const count of [seed, draws, sinceReset]) {
    if (+count > MOST) throw new Error(`This state has a seed or count of ${count}; the largest is ${MOST}.`);
  }
  const carry = Array.from({ length: info.numLayers }, (_, layer) =>
    values.slice(layer * info.hiddenDim, (layer + 1) * info.hiddenDim),
  );
  return { carry, last: +last, seed: +seed, draws: +draws, sinceReset: +sinceReset };
}
