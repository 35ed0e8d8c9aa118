import { softmax } from "./model";
import type { SamplingOptions } from "./types";

/** Return the next token: the most likely one (the first in a tie) at temperature 0, or a drawn one. */
export function nextToken(logits: Float32Array, u: number, options: SamplingOptions): number {
  const { temperature, topK } = options;
  if (temperature === 0) return logits.indexOf(Math.max(...logits));
  return draw(probabilities(logits, temperature, topK), u);
}

/** Return the probabilities of all tokens (V,); at temperature 0, the most likely one has them all. */
export function nextProbabilities(logits: Float32Array, options: SamplingOptions): Float64Array {
  const { temperature, topK } = options;
  if (temperature !== 0) return probabilities(logits, temperature, topK);
  const found = new Float64Array(logits.length);
  found[logits.indexOf(Math.max(...logits))] = 1;
  return found;
}

/** Return the distribution to draw from, as jaxgru.lm.sampling: tokens that tie with the last one kept are kept, too. */
export function probabilities(logits: Float32Array, temperature: number, topK: number | null): Float64Array {
  if (!(temperature > 0 && temperature < Infinity))
    throw new Error(`The temperature is ${temperature}; it must be at least 0 and finite.`);
  if (topK !== null && !(Number.isInteger(topK) && topK >= 1 && topK <= logits.length))
    throw new Error(`Top-k is ${topK}; it must be from 1 to ${logits.length}.`);
  const least = topK === null ? -Infinity : logits.slice().sort()[logits.length - topK];
  const top = Math.max(...logits);
  return softmax(Float64Array.from(logits, (v) => (v < least ? -Infinity : (v - top) / temperature)));
}

/** Return the first token whose cumulative probability exceeds u, of [0, 1). */
export function draw(p: Float64Array, u: number): number {
  let last = 0;
  let cumulative = 0;
  for (let token = 0; token < p.length; token++) {
    if (p[token] === 0) continue;
    cumulative += p[token];
    if (cumulative > u) return token;
    last = token;
  }
  return last; // the sum can round to less than 1
}

/** Return draw i of a seed, uniform in [0, 1): it depends on the two alone. */
export function uniform(seed: number, i: number): number {
  return threefry([low(seed), high(seed)], [low(i), high(i)])[0] / 2 ** 32;
}

const low = (n: number) => n >>> 0;
const high = (n: number) => Math.floor(n / 2 ** 32) >>> 0;

/** Threefry-2x32 with 20 rounds: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11). */
export function threefry(key: [number, number], counter: [number, number]): [number, number] {
  const keys = [key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bda];
  let x = (counter[0] + keys[0]) | 0;
  let y = (counter[1] + keys[1]) | 0;
  for (let group = 1; group <= 5; group++) {
    for (const distance of ROTATIONS[(group - 1) % 2]) {
      x = (x + y) | 0;
      y = ((y << distance) | (y >>> (32 - distance))) ^ x;
    }
    x = (x + keys[group % 3]) | 0;
    y = (y + keys[(group + 1) % 3] + group) | 0;
  }
  return [x >>> 0, y >>> 0];
}

const ROTATIONS = [[13, 15, 26, 6], [17, 29, 16, 24]];
