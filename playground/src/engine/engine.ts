import bigram from "../../assets/bigram.json";
import units from "../../assets/units.json";
import { loadModel, nats, type Model, type Step } from "./model";
import { nextProbabilities, nextToken, uniform } from "./sampling";
import { Slots, type Slices } from "./slices";
import { encode } from "./text";
import type { Carry, Engine, ModelName, UnitInfo } from "./types";

/** Steps through which `reach` differentiates; before them, these models' gradients are 0 in 32 bits. */
export const MAX_STEPS = 512;

/** Numbers that `states` returns at most, 256 MB. */
const MAX_STATES = 2 ** 26;

/** Make an engine; `fetchModel` returns the model's file. */
export function createEngine(fetchModel: (name: ModelName) => Promise<ArrayBuffer>): Engine {
  const models = new Map<ModelName, Promise<{ model: Model; bytes: number }>>();
  const slots = new Slots();

  function load(name: ModelName) {
    let loading = models.get(name);
    if (!loading) {
      loading = fetchModel(name).then((file) => ({ model: loadModel(file), bytes: file.byteLength }));
      loading.catch(() => models.delete(name)); // the next call tries again
      models.set(name, loading);
    }
    return loading;
  }

  /** Begin a call that reads tokens. */
  async function begin(name: ModelName, tokens: Uint8Array, resetEvery: number | null, slot?: string) {
    const slices = slots.begin(slot);
    const { model } = await load(name);
    checkTokens(tokens, model.V);
    checkReset(resetEvery);
    await slices.rest(); // so that only the newest of many calls begins
    return { model, slices };
  }

  async function surprise(stream: Stream, tokens: Uint8Array, resetEvery: number | null, slices: Slices) {
    const result = new Float32Array(Math.max(0, tokens.length - 1));
    await stream.readAll(tokens.subarray(0, -1), resetEvery, slices, (t) => {
      result[t] = nats(stream.logits(), tokens[t + 1]);
    });
    return result;
  }

  return {
    async load(name) {
      const { model, bytes } = await load(name);
      const { cell, H: hiddenDim, L: numLayers, numParams, vocabulary } = model;
      return { name, cell, hiddenDim, numLayers, numParams, bytes, vocabulary };
    },

    async encode(name, text) {
      return encode((await load(name)).model.vocabulary, text);
    },

    async start(name, tokens, seed, resetEvery, carry, slot) {
      const { model, slices } = await begin(name, tokens, resetEvery, slot);
      if (!tokens.length) throw new Error("The prompt is empty; give at least one character to begin with.");
      const stream = new Stream(model, carry);
      await stream.readAll(tokens.subarray(0, -1), resetEvery, slices);
      return { carry: stream.carry, sinceReset: stream.sinceReset, last: tokens[tokens.length - 1], seed, draws: 0 };
    },

    async write(name, writing, n, options) {
      const { resetEvery } = options;
      const { model, slices } = await begin(name, new Uint8Array(0), resetEvery);
      checkTokens([writing.last], model.V); // a Uint8Array would wrap it
      const stream = new Stream(model, writing.carry, writing.sinceReset);
      const tokens = new Uint8Array(n);
      let { last, draws } = writing;
      for (let i = 0; i < n; i++) {
        stream.read(last, resetEvery);
        tokens[i] = last = nextToken(stream.logits(), uniform(writing.seed, draws++), options);
        if (slices.over) await slices.rest();
      }
      const { carry, sinceReset } = stream;
      return { tokens, writing: { carry, sinceReset, last, seed: writing.seed, draws } };
    },

    async next(name, writing, options) {
      const { model } = await begin(name, new Uint8Array(0), options.resetEvery);
      checkTokens([writing.last], model.V);
      const stream = new Stream(model, writing.carry, writing.sinceReset);
      stream.read(writing.last, options.resetEvery);
      return nextProbabilities(stream.logits(), options);
    },

    async surprise(name, tokens, resetEvery, slot) {
      const { model, slices } = await begin(name, tokens, resetEvery, slot);
      return surprise(new Stream(model), tokens, resetEvery, slices);
    },

    async bigramSurprise(tokens) {
      checkTokens(tokens, bigram.nats.length);
      const result = new Float32Array(Math.max(0, tokens.length - 1));
      return result.map((_, t) => bigram.nats[tokens[t]][tokens[t + 1]]);
    },

    async memoryCurve(name, tokens, resets, onPoint, slot) {
      const { model, slices } = await begin(name, tokens, null, slot);
      resets.forEach(checkReset);
      if (tokens.length < 2) return;
      for (const reset of resets) {
        const result = await surprise(new Stream(model), tokens, reset, slices);
        await onPoint(reset, result.reduce((a, b) => a + b, 0) / result.length);
      }
    },

    async states(name, tokens, resetEvery, slot) {
      const { model, slices } = await begin(name, tokens, resetEvery, slot);
      const width = model.L * model.H;
      if (tokens.length * width > MAX_STATES)
        throw new Error(`The text is too long for its states: at most ${Math.floor(MAX_STATES / width)} characters.`);
      const result = new Float32Array(tokens.length * width);
      const stream = new Stream(model);
      await stream.readAll(tokens, resetEvery, slices, (t) =>
        stream.carry.forEach((h, i) => result.set(h, t * width + i * model.H)));
      return result;
    },

    async step(name, tokens) {
      const { model, slices } = await begin(name, tokens, null);
      if (!tokens.length) throw new Error("There is no character to read.");
      const stream = new Stream(model);
      await stream.readAll(tokens.subarray(0, -1), null, slices);
      const layers = model.stepToDifferentiate(stream.carry, tokens[tokens.length - 1]);
      return layers.map(({ h, a }, i) => ({ before: h, gates: a, after: stream.carry[i] }));
    },

    async units(name) {
      return units.models[name] as UnitInfo[];
    },

    async reach(name, tokens, at, resetEvery, slot) {
      const { model, slices } = await begin(name, tokens, resetEvery, slot);
      if (!(Number.isInteger(at) && at >= 0 && at < tokens.length))
        throw new Error(`There is no character ${at} in a text of ${tokens.length}.`);
      const result = new Float32Array(at);
      if (at === 0) return result;
      const lastReset = resetEvery === null ? 0 : at - 1 - ((at - 1) % resetEvery);
      const first = Math.max(lastReset, at - MAX_STEPS);
      const stream = new Stream(model);
      await stream.readAll(tokens.subarray(lastReset, first), null, slices);
      const steps: Step[] = [];
      for (let t = first; t < at; t++) steps.push(model.stepToDifferentiate(stream.carry, tokens[t]));
      result.set(model.embeddingGradients(steps, stream.carry, tokens[at]), first);
      return result;
    },

    async read(name, tokens, resetEvery, carry, slot) {
      const { model, slices } = await begin(name, tokens, resetEvery, slot);
      const stream = new Stream(model, carry);
      await stream.readAll(tokens, resetEvery, slices);
      return stream.carry;
    },
  };
}

/** The state of a model as it reads, set to zero every so often. */
class Stream {
  readonly carry: Carry;

  /** A given state has read at least one token. */
  constructor(private readonly model: Model, carry?: Carry, public sinceReset = carry ? 1 : 0) {
    if (carry) checkCarry(carry, model);
    this.carry = carry ? carry.map((h) => h.slice()) : model.initialCarry();
  }

  read(token: number, resetEvery: number | null): void {
    if (resetEvery !== null && this.sinceReset >= resetEvery) this.sinceReset = 0;
    if (this.sinceReset === 0) this.model.firstStep(this.carry, token);
    else this.model.step(this.carry, token);
    this.sinceReset++;
  }

  async readAll(tokens: Uint8Array, resetEvery: number | null, slices: Slices, after?: (t: number) => void) {
    for (let t = 0; t < tokens.length; t++) {
      this.read(tokens[t], resetEvery);
      after?.(t);
      if (slices.over) await slices.rest();
    }
  }

  logits(): Float32Array {
    return this.model.logits(this.carry);
  }
}

function checkTokens(tokens: Iterable<number>, V: number): void {
  for (const token of tokens)
    if (!(Number.isInteger(token) && token >= 0 && token < V)) throw new Error(`There is no token ${token}; the vocabulary's are 0 to ${V - 1}.`);
}

function checkReset(resetEvery: number | null): void {
  if (resetEvery !== null && !(Number.isInteger(resetEvery) && resetEvery >= 1))
    throw new Error(`The state cannot be reset every ${resetEvery} characters; it must be at least 1.`);
}

function checkCarry(carry: Carry, { L, H }: Model): void {
  if (carry.length !== L || carry.some((h) => h.length !== H))
    throw new Error(
      `The state has the sizes ${carry.map((h) => h.length).join(", ") || "of no layer"}; ` +
      `this model's has ${L === 1 ? "one layer" : `${L} layers`} of ${H}.`,
    );
  if (!carry.every((h) => h.every(Number.isFinite))) throw new Error("The state has numbers that are not finite.");
}
