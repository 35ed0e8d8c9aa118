/** The engine against jaxgru: on what tests/playground/fixtures.py wrote to the folder PLAYGROUND_FIXTURES. */

import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { beforeAll, describe, expect, test } from "vitest";
import { createEngine } from "./engine";
import { loadModel } from "./model";
import { probabilities, threefry } from "./sampling";
import { readSafetensors, type Safetensors } from "./safetensors";
import type { ModelName } from "./types";

const folder = process.env.PLAYGROUND_FIXTURES;
const files = folder ? readdirSync(folder).filter((name) => name.endsWith(".fixture.safetensors")) : [];

const read = (path: string) => {
  const bytes = readFileSync(path);
  return bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) as ArrayBuffer;
};

interface Described {
  model: string;
  tokens: number[];
  prompt: number[];
  greedy: Record<string, number[]>;
}

interface Numbers {
  sampling: [number, number | null][];
  keys: [number, number][];
  counters: [number, number][];
  random: [number, number][];
}

/**
 * Relative differences are of at least this. Each step back adds rounding errors: elman_alpha's gradient, which has
 * shrunk to 1e-28 after 100 steps, was seen to differ by 1e-4 there; and what is below 1e-38, XLA makes 0.
 */
const TINY = 1e-20;

/** Say the largest difference, and return it. */
function worst(what: string, ours: ArrayLike<number>, theirs: ArrayLike<number>, relative = false): number {
  expect(ours.length).toBe(theirs.length);
  let result = 0;
  for (let i = 0; i < ours.length; i++) {
    const unit = relative ? Math.max(Math.abs(theirs[i]), TINY) : 1;
    result = Math.max(result, Math.abs(ours[i] - theirs[i]) / unit); // NaN stays NaN
  }
  console.log(`${what}: ${result.toExponential(1)}`);
  return result;
}

describe.skipIf(!files.length).each(files)("%s", { timeout: 600_000 }, (file) => {
  const { metadata, tensors } = readSafetensors(read(join(folder!, file)));
  const fixture: Described = JSON.parse(metadata.fixture);
  const tokens = Uint8Array.from(fixture.tokens);
  const engine = createEngine(async () => read(fixture.model));
  const name = file as ModelName; // the engine is given the one model
  const resetsOf = (kind: string) =>
    [...tensors.keys()].filter((key) => key.startsWith(`${kind}.`)).map((key) => {
      const every = key.slice(kind.length + 1);
      return { key, every: every === "None" ? null : Number(every) };
    });
  const say = (what: string) => `${file} ${what}`;

  // Both compute in 32 bits, but add in another order. Logits go up to 20, whose last bit is 2e-6; sums of up to 256
  // such numbers were seen to differ by 1e-5, and the other bounds are in proportion.
  test.each([true, false])("logits, SIMD %s", (simd) => {
    const model = loadModel(read(fixture.model), simd);
    const carry = model.initialCarry();
    const n = simd ? tokens.length : Math.min(tokens.length, 300);
    const logits = new Float32Array(n * model.V);
    for (let t = 0; t < n; t++) {
      model.step(carry, tokens[t]);
      logits.set(model.logits(carry), t * model.V);
    }
    const theirs = tensors.get("logits")!.data.subarray(0, logits.length);
    expect(worst(say(`logits, SIMD ${simd}`), logits, theirs)).toBeLessThan(3e-5);
  });

  test("nats, and their means", async () => {
    const means = new Map<number | null, number>();
    await engine.memoryCurve(name, tokens, resetsOf("nats").map(({ every }) => every), (every, mean) => {
      means.set(every, mean);
    });
    for (const { key, every } of resetsOf("nats")) {
      const theirs = tensors.get(key)!.data;
      const ours = await engine.surprise(name, tokens, every);
      expect(worst(say(key), ours, theirs)).toBeLessThan(3e-5);
      const mean = theirs.reduce((a, b) => a + b, 0) / theirs.length;
      expect(worst(say(`mean ${key}`), [means.get(every)!], [mean])).toBeLessThan(1e-6);
    }
  });

  test("states", async () => {
    for (const { key, every } of resetsOf("states")) {
      const { data, shape } = tensors.get(key)!;
      const ours = await engine.states(name, tokens.subarray(0, shape[0]), every);
      expect(worst(say(key), ours, data)).toBeLessThan(1e-5);
      const last = await engine.read(name, tokens.subarray(0, shape[0]), every);
      expect(last.flatMap((h) => [...h])).toEqual([...ours.slice(-shape[1])]);
    }
  });

  test("reach", async () => {
    for (const { key, every } of resetsOf("reach")) {
      const { data } = tensors.get(key)!;
      const ours = await engine.reach(name, tokens, data.length, every);
      expect(worst(say(key), ours, data, true)).toBeLessThan(1e-4);
    }
  });

  test("greedy text is the same", async () => {
    for (const [key, theirs] of Object.entries(fixture.greedy)) {
      const resetEvery = key === "None" ? null : Number(key);
      const start = await engine.start(name, Uint8Array.from(fixture.prompt), 0, resetEvery);
      const { tokens } = await engine.write(name, start, theirs.length, { temperature: 0, topK: null, resetEvery });
      expect([...tokens]).toEqual(theirs);
    }
  });
});

describe.skipIf(!folder)("numbers", () => {
  let tensors: Safetensors["tensors"];
  let fixture: Numbers;
  beforeAll(() => {
    const file = readSafetensors(read(join(folder!, "numbers.safetensors")));
    ({ tensors } = file);
    fixture = JSON.parse(file.metadata.fixture);
  });

  test("the distribution that is drawn from", () => {
    const { data } = tensors.get("probabilities")!;
    const logits = tensors.get("logits")!.data;
    const ours = fixture.sampling.flatMap(([temperature, k]) => [...probabilities(logits, temperature, k)]);
    // of e to the power of up to 50, 32 bits leave a relative precision of 50 · 2⁻²⁴
    expect(worst("probabilities", ours, data)).toBeLessThan(1e-6);
    expect(ours.map((p) => p > 0)).toEqual([...data].map((p) => p > 0));
  });

  test("random numbers", () => {
    expect(fixture.keys.map((key, i) => threefry(key, fixture.counters[i]))).toEqual(fixture.random);
  });

  test("numbers of 16 bits", () => {
    const [ours, theirs] = ["half", "half_in_32_bits"].map((name) => tensors.get(name)!.data);
    // Object.is: NaN is NaN, and −0 is not 0
    expect(ours.length).toBe(2 ** 16);
    expect(ours.findIndex((x, i) => !Object.is(x, theirs[i]))).toBe(-1);
  });
});
