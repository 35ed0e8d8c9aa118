/** What the models say of the text, computed again when the text or the model changes. */

import { batch, computed, effect, signal, untracked } from "@preact/signals";
import type { Encoded, ModelInfo } from "./engine/types";
import { charactersOf, debounce, engine, leftOut, loaded, newest, report } from "./models";
import { at, every, model, RESETS, text, type Reset } from "./view";

export interface Analysed {
  info: ModelInfo;
  tokens: Uint8Array;
  characters: string[];
  encoded: Encoded;
}

/** The text as the model reads it. */
export const analysed = signal<Analysed | null>(null);
/** Nats of each character but the first, by how often the state is reset, as they become known. */
export const surprises = signal(new Map<Reset, Float32Array>());
/** Whether what is known is not yet of the text and the model that are shown. */
export const stale = signal(true);
/** The same by bigram counts. */
export const bigram = signal<Float32Array | null>(null);

export const mean = (values: Float32Array) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** The character that is looked at, within the text. */
export const index = computed(() => Math.min(at.value, (analysed.value?.tokens.length ?? 1) - 1));

/** What is left out of the text, in one sentence each. */
export const notes = computed(() => {
  const found: string[] = [];
  if (!analysed.value) return found;
  const { encoded, tokens } = analysed.value;
  if (encoded.unknown.length) found.push(leftOut(encoded));
  if (tokens.length < 2) found.push("Type or paste at least two characters that the models know.");
  return found;
});

let generation = 0;

async function analyse(info: ModelInfo): Promise<void> {
  const mine = ++generation;
  const { name } = info;
  const encoded = await engine.encode(name, text.value);
  if (mine !== generation) return;
  const { tokens } = encoded;
  const characters = charactersOf(info, tokens);
  batch(() => {
    surprises.value = new Map();
    bigram.value = null;
    analysed.value = { info, tokens, characters, encoded };
    stale.value = tokens.length > 1;
  });
  if (tokens.length < 2) return;
  const wanted = untracked(() => every.value);
  for (const reset of new Set([null, wanted, ...RESETS])) {
    const nats = await engine.surprise(name, tokens, reset, "surprise");
    if (mine !== generation) return;
    surprises.value = new Map(surprises.value).set(reset, nats);
    if (reset === wanted) stale.value = false;
    if (bigram.value === null) {
      const counted = await engine.bigramSurprise(tokens);
      if (mine !== generation) return;
      bigram.value = counted;
    }
  }
}

/** Start to analyse: at once, then whenever the text or the model changes, once that is loaded. */
export function startAnalysis(): void {
  const run = () => {
    if (loaded.value?.name === model.value) void analyse(loaded.value).catch(report);
  };
  const later = debounce(200, run);
  let first = true;
  effect(() => {
    loaded.value, model.value, text.value;
    stale.value = true;
    if (first) untracked(run);
    else later();
    first = false;
  });
}

/** Compute with `compute` whenever what it reads changes; what `use` gets is in order. */
export function follow<R>(reads: () => unknown, compute: (given: Analysed) => Promise<R>, use: (result: R) => void): () => void {
  const run = newest(compute, use);
  return effect(() => {
    reads();
    if (analysed.value && analysed.value.tokens.length > 1) void run(analysed.value);
  });
}
