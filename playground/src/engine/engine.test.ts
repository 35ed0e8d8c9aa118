import { readFileSync } from "node:fs";
import { beforeAll, describe, expect, test } from "vitest";
import bigram from "../../assets/bigram.json";
import { createEngine, MAX_STEPS } from "./engine";
import { draw, uniform } from "./sampling";
import type { Carry, SamplingOptions, Writing } from "./types";

const name = "elman_alpha";
const file = readFileSync(new URL("../../../jaxgru/lm/pretrained/elman_alpha.safetensors", import.meta.url));
const fetchModel = async () => new Uint8Array(file).buffer;
const engine = createEngine(fetchModel);
const options: SamplingOptions = { temperature: 0.9, topK: 20, resetEvery: null };
const RESETS = [1, 2, 7, null];

let prompt: Uint8Array;
let vocabulary: string[];
beforeAll(async () => {
  ({ vocabulary } = await engine.load(name));
  ({ tokens: prompt } = await engine.encode(name, "ROMEO: O, she doth teach"));
});

const start = (seed = 3, resetEvery: number | null = null) => engine.start(name, prompt, seed, resetEvery);
const write = (writing: Writing, n: number, resetEvery: number | null = null) =>
  engine.write(name, writing, n, { ...options, resetEvery });
const aborted = expect.objectContaining({ name: "AbortError" });

describe("a model", () => {
  test("is described", async () => {
    const info = await engine.load(name);
    expect(info).toMatchObject({ name, cell: "rnn", hiddenDim: 128, numLayers: 1, bytes: file.byteLength });
    expect(info.vocabulary.length).toBe(bigram.nats.length);
  });

  test("is fetched once, and again after a failure", async () => {
    let calls = 0;
    const engine = createEngine(async () => {
      if (calls++ === 0) throw new Error("offline");
      return fetchModel();
    });
    await expect(engine.load(name)).rejects.toThrow("offline");
    await Promise.all([engine.load(name), engine.load(name), engine.encode(name, "a")]);
    expect(calls).toBe(2);
  });

  test("that is damaged is refused", async () => {
    const cut = createEngine(async () => (await fetchModel()).slice(0, 10_000));
    await expect(cut.load(name)).rejects.toThrow("cut off");
  });

  const changed = async (from: string, to: string) => {
    const bytes = await fetchModel();
    const text = new TextDecoder("latin1").decode(bytes);
    expect(to.length).toBe(from.length); // the header says its length
    const at = text.indexOf(from);
    new Uint8Array(bytes).set(new TextEncoder().encode(to), at);
    return createEngine(async () => bytes).load(name);
  };

  test.each([
    ['"format":"jaxgru"', '"format":"others"', "not a model of jaxgru"],
    ["num_layers = 1", "num_layers = 2", "lacks layers.1.W"],
    ["num_layers = 1", "num_layers = 0", "num_layers is 0"],
    ["hidden_dim = 128", "hidden_dim = 127", "shape"],
    ["final_norm = false", "final_norm = true ", "layer normalisation"],
    ["final_norm = false", "activation='gelu' ", "activation is gelu"],
    ['\\"rnn\\"', '\\"mlp\\"', "cell is mlp"],
    ["[model]", "[model ", "config"],
    ['"tokenizer":"characters"', '"tokenizer":"somethings"', "tokens are not characters"],
  ])("with %s → %s is refused", async (from, to, why) => {
    await expect(changed(from, to)).rejects.toThrow(why);
  });

  test("with more parameters than are read is refused", async () => {
    const bytes = await fetchModel();
    const length = Number(new DataView(bytes).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)));
    header["layers.0.scale"] = header["head.bo"]; // as layer normalisation has
    const text = new TextEncoder().encode(JSON.stringify(header));
    const start = new BigUint64Array([BigInt(text.length)]);
    const file = new Blob([start, text, bytes.slice(8 + length)]);
    const loading = createEngine(async () => file.arrayBuffer()).load(name);
    await expect(loading).rejects.toThrow("The model has layers.0.scale, which this page does not compute.");
  });
});

describe("a text that is written", () => {
  test.each(RESETS)("n and n more are 2n, reset every %s", async (resetEvery) => {
    const whole = await write(await start(3, resetEvery), 60, resetEvery);
    const first = await write(await start(3, resetEvery), 23, resetEvery);
    const second = await write(first.writing, 37, resetEvery);
    expect([...first.tokens, ...second.tokens]).toEqual([...whole.tokens]);
    expect(second.writing).toEqual(whole.writing);
  });

  test("takes a draw of its own for each character", async () => {
    const { tokens, writing } = await write(await start(3, 1), 40, 1);
    expect(writing.draws).toBe(40);
    // Stateless, the logits depend on the last token: after equal ones, only the draws can differ.
    const after = new Map<number, Set<number>>();
    tokens.forEach((token, i) => {
      const last = i ? tokens[i - 1] : prompt[prompt.length - 1];
      after.set(last, (after.get(last) ?? new Set()).add(token));
    });
    expect([...after.values()].some((set) => set.size > 1)).toBe(true);
  });

  test("is a function of its arguments", async () => {
    const writing = await start();
    const before = structuredClone(writing);
    const one = await write(writing, 30);
    expect(writing).toEqual(before);
    expect(await write(writing, 30)).toEqual(one);
    expect((await write(await start(4), 30)).tokens).not.toEqual(one.tokens);
    expect((await write(writing, 0)).writing).toEqual(writing);
  });

  test("from a last token that does not exist is refused", async () => {
    const writing = await start();
    for (const last of [vocabulary.length, 300, -1, 1.5, NaN]) {
      await expect(write({ ...writing, last }, 1)).rejects.toThrow(`There is no token ${last}`);
    }
  });

  test("without its state depends on the last token alone", async () => {
    const writing = await start(3, 1);
    const other: Carry = writing.carry.map((h) => h.map((_, i) => Math.sin(i)));
    expect((await write({ ...writing, carry: other }, 40, 1)).tokens).toEqual((await write(writing, 40, 1)).tokens);
    const pasted = await engine.start(name, prompt.subarray(-1), 3, 1, other);
    expect((await write(pasted, 40, 1)).tokens).toEqual((await write(writing, 40, 1)).tokens);
  });

  test("resets its state when it is due, also if the slider moves", async () => {
    const all = Uint8Array.of(...prompt, ...(await write(await start(), 10)).tokens);
    const continued = await write(await start(3, null), 10, null);
    expect(continued.writing.sinceReset).toBe(prompt.length - 1 + 10);
    const after = await write(continued.writing, 1, 5); // far more than 5 were read: reset at once
    expect(after.writing.sinceReset).toBe(1);
    expect(after.writing.carry).toEqual(await engine.read(name, all.subarray(-1), null));
    const later = await write(after.writing, 5, 5);
    expect(later.writing.sinceReset).toBe(1);
  });

  test.each(RESETS)("is drawn from the next probabilities, which are those that a text costs, reset every %s", async (resetEvery) => {
    const writing = await start(3, resetEvery);
    const drawn = await engine.next(name, writing, { ...options, resetEvery });
    const { tokens } = await write(writing, 1, resetEvery);
    expect(tokens[0]).toBe(draw(drawn, uniform(3, 0)));
    expect(drawn.filter((p) => p > 0)).toHaveLength(options.topK!);
    const p = await engine.next(name, writing, { temperature: 1, topK: null, resetEvery });
    for (const token of [0, 1, 40]) {
      const costs = await engine.surprise(name, Uint8Array.of(...prompt, token), resetEvery);
      expect(-Math.log(p[token])).toBeCloseTo(costs.at(-1)!, 5);
    }
    const greedy = await engine.next(name, writing, { temperature: 0, topK: null, resetEvery });
    expect([greedy.indexOf(1), greedy.reduce((a, b) => a + b)]).toEqual([p.indexOf(Math.max(...p)), 1]);
  });

  test("goes on from a state that was copied", async () => {
    const written = await write(await start(), 25);
    const carry = await engine.read(name, Uint8Array.of(...prompt, ...written.tokens), null);
    const copied = JSON.parse(JSON.stringify(carry.map((h) => [...h]))).map((h: number[]) => Float32Array.from(h));
    const more = (await engine.encode(name, "ing of")).tokens;
    const one = await engine.start(name, Uint8Array.of(...prompt, ...written.tokens, ...more), 9, null);
    const other = await engine.start(name, more, 9, null, copied);
    expect(other.carry).toEqual(one.carry);
    expect((await write(other, 30)).tokens).toEqual((await write(one, 30)).tokens);
  });

  test("needs a prompt, and a state that fits", async () => {
    await expect(engine.start(name, new Uint8Array(0), 0, null)).rejects.toThrow("The prompt is empty");
    const wrong = [[], [new Float32Array(127)], [new Float32Array(128), new Float32Array(128)]];
    for (const carry of wrong) await expect(engine.start(name, prompt, 0, null, carry)).rejects.toThrow("this model's");
    await expect(engine.start(name, prompt, 0, null, [new Float32Array(128).fill(NaN)])).rejects.toThrow("finite");
  });
});

describe("a text that is read", () => {
  test("ends with a step that the state shows", async () => {
    const [layer] = await engine.step(name, prompt);
    expect([layer.before]).toEqual(await engine.read(name, prompt.subarray(0, -1), null));
    expect([layer.after]).toEqual(await engine.read(name, prompt, null));
    expect(layer.gates).toEqual(layer.after); // the Elman RNN has no gates
    await expect(engine.step(name, new Uint8Array(0))).rejects.toThrow("no character");
  });

  test.each(RESETS)("the curve has the mean of the surprise, reset every %s", async (reset) => {
    const surprise = await engine.surprise(name, prompt, reset);
    const points: unknown[] = [];
    await engine.memoryCurve(name, prompt, [reset], (...point) => points.push(point));
    expect(surprise.length).toBe(prompt.length - 1);
    expect(points).toEqual([[reset, surprise.reduce((a, b) => a + b, 0) / surprise.length]]);
  });

  test("that is too short has no surprise", async () => {
    for (const tokens of [new Uint8Array(0), prompt.subarray(0, 1)]) {
      expect(await engine.surprise(name, tokens, null)).toEqual(new Float32Array(0));
      expect(await engine.bigramSurprise(tokens)).toEqual(new Float32Array(0));
      await engine.memoryCurve(name, tokens, [1, null], () => expect.unreachable());
      expect((await engine.states(name, tokens, null)).length).toBe(tokens.length * 128);
    }
    expect(await engine.read(name, new Uint8Array(0), null)).toEqual([new Float32Array(128)]);
    expect(await engine.reach(name, prompt.subarray(0, 1), 0, null)).toEqual(new Float32Array(0));
  });

  test("by the counted bigram", async () => {
    const surprise = await engine.bigramSurprise(prompt);
    surprise.forEach((nats, t) => expect(nats).toBe(Math.fround(bigram.nats[prompt[t]][prompt[t + 1]])));
    for (const row of bigram.nats) {
      const total = row.reduce((sum, nats) => sum + Math.exp(-nats), 0);
      expect(Math.abs(total - 1)).toBeLessThan(1e-4); // the nats are rounded to 4 places
    }
  });

  test("reaches no further than the last reset, and no further than it is differentiated", async () => {
    const at = 20;
    const stateless = await engine.reach(name, prompt, at, 1);
    expect(stateless.findIndex((g) => g > 0)).toBe(at - 1);
    expect((await engine.reach(name, prompt, at, 8)).findIndex((g) => g > 0)).toBe(16);
    expect((await engine.reach(name, prompt, at, null)).every((g) => g > 0)).toBe(true);
    const long = new Uint8Array(MAX_STEPS + 50).map((_, i) => prompt[i % prompt.length]);
    const far = await engine.reach(name, long, long.length - 1, null);
    expect(far.subarray(0, 49).every((g) => g === 0)).toBe(true);
    expect(far.at(-1)).toBeGreaterThan(0);
  });

  test("with tokens, places or resets that do not exist is refused in one sentence", async () => {
    const V = vocabulary.length;
    await expect(engine.surprise(name, Uint8Array.of(1, V), null)).rejects.toThrow(`There is no token ${V}`);
    await expect(engine.bigramSurprise(Uint8Array.of(V))).rejects.toThrow(`There is no token ${V}`);
    for (const every of [0, -1, 1.5, NaN]) await expect(engine.read(name, prompt, every)).rejects.toThrow("at least 1");
    for (const at of [-1, 24, 1.5]) await expect(engine.reach(name, prompt, at, null)).rejects.toThrow("no character");
    await expect(engine.states(name, new Uint8Array(2 ** 20), null)).rejects.toThrow("at most 524288 characters");
  });
});

describe("a newer call", () => {
  const long = new Uint8Array(6_000);

  test("ends an older one of its slot, before or while it computes", async () => {
    const points: (number | null)[] = [];
    const older = engine.memoryCurve(name, long, [5, 6, 7], (every) => {
      points.push(every);
      void engine.surprise(name, prompt, null, "a");
    }, "a");
    await expect(older).rejects.toEqual(aborted);
    expect(points).toEqual([5]);
    const calls = [1, 2, 3].map((every) => engine.surprise(name, prompt, every, "b"));
    await expect(calls[0]).rejects.toEqual(aborted);
    await expect(calls[1]).rejects.toEqual(aborted);
    expect(await calls[2]).toEqual(await engine.surprise(name, prompt, 3));
  });

  test("of another slot, or of none, is computed beside it", async () => {
    const alone = await engine.surprise(name, long, null);
    const together = await Promise.all([
      engine.surprise(name, long, null, "a"),
      engine.surprise(name, long, 3, "b"),
      engine.states(name, prompt, null),
      write(await start(), 20),
    ]);
    expect(together[0]).toEqual(alone);
  });

  test("is answered while a long one computes", async () => {
    let done = false;
    const computing = engine.surprise(name, new Uint8Array(20_000), null).then(() => (done = true));
    await write(await start(), 1);
    expect(done).toBe(false);
    await computing;
  });
});
