import { parse } from "smol-toml";
import { gru } from "./gru";
import type { Layer, LayerParams } from "./layer";
import { Arena } from "./product";
import { rnn } from "./rnn";
import { readSafetensors, type Safetensors } from "./safetensors";
import type { Carry } from "./types";

/**
 * The language model, as in jaxgru/lm/model.py: embedding → stacked cells → head.
 *
 * Letters: V vocabulary size, E embedding size, H hidden size, L number of layers.
 */
export interface Model {
  readonly cell: "gru" | "rnn";
  readonly H: number;
  readonly L: number;
  readonly V: number;
  readonly numParams: number;
  readonly vocabulary: string[];
  initialCarry(): Carry;
  /** Read a token: the carry (changed in place) becomes the next one. */
  step(carry: Carry, token: number): void;
  /** The same from zeros, whatever the carry is: faster, because there are only V such steps. */
  firstStep(carry: Carry, token: number): void;
  /** Return the logits of the next token (V,), valid until the next call. */
  logits(carry: Carry): Float32Array;
  /** As `step`, but return what the gradient needs. */
  stepToDifferentiate(carry: Carry, token: number): Step;
  /**
   * Return the norm of the gradient of −ln p(target) with respect to the embedding of each token read in `steps`,
   * after which the carry is `carry`.
   */
  embeddingGradients(steps: Step[], carry: Carry, target: number): Float32Array;
}

/** One time step of each layer: the state before it and the gates' values in it. */
export type Step = { h: Float32Array; a: Float32Array }[];

/** Make the model of a .safetensors file of jaxgru. Throws an Error of one sentence if that cannot be done. */
export function loadModel(file: ArrayBuffer, simd?: boolean): Model {
  const { metadata, tensors } = readSafetensors(file);
  if (metadata.format !== "jaxgru") throw new Error("The file is not a model of jaxgru (no format = jaxgru).");
  const config = readConfig(metadata);
  const vocabulary = readVocabulary(metadata);
  const { cell, embedding_dim: E, hidden_dim: H, num_layers: L } = config;
  const V = vocabulary.length;

  const unread = new Set(tensors.keys());
  const read = (name: string, shape: number[]) => {
    unread.delete(name);
    return tensor(tensors, name, shape);
  };
  const matrix = (name: string, rows: number, columns: number) => read(name, [rows, columns]);
  const vector = (name: string, length: number) => read(name, [length]);
  const paramsOf = (layer: string): LayerParams => ({
    matrix: (name, rows, columns) => matrix(`${layer}.${name}`, rows, columns),
    vector: (name, length) => vector(`${layer}.${name}`, length),
    has: (name) => tensors.has(`${layer}.${name}`),
  });

  const shapes = [...tensors.values()].map(({ shape }) => [shape[0] ?? 1, shape[1] ?? 1] as const);
  const arena = new Arena(shapes, simd);

  const layers: Layer[] = [];
  for (let i = 0; i < L; i++) {
    const p = paramsOf(`layers.${i}`);
    const inputs = i ? H : E;
    layers.push(cell === "gru" ? gru(arena, p, inputs, H, config.reset_gate) : rnn(arena, p, inputs, H));
  }
  const [first] = layers;
  const top = layers[L - 1];

  const Wo = arena.matrix(H, config.tied_embedding ? transposed(matrix("embedding", V, H), V) : matrix("head.Wo", H, V));
  const bo = vector("head.bo", V);
  const output = arena.vector(V);
  const x = arena.vector(E); // an embedding, or its gradient

  // The first layer's x·W + b, for each token
  const embedding = matrix("embedding", V, E);
  for (const name of unread) throw new Error(`The model has ${name}, which this page does not compute.`);
  const inputs = Array.from({ length: V }, (_, token) => {
    x.set(embedding.subarray(token * E, (token + 1) * E));
    first.a.set(first.b);
    first.W.times(x, first.a);
    return first.a.slice();
  });

  const initialCarry = (): Carry => layers.map(() => new Float32Array(H));

  function step(carry: Carry, token: number): void {
    first.a.set(inputs[token]);
    for (let i = 0; i < L; i++) {
      const layer = layers[i];
      if (i) {
        layer.a.set(layer.b);
        layer.W.times(layers[i - 1].h, layer.a);
      }
      layer.h.set(carry[i]);
      layer.step();
      carry[i].set(layer.h);
    }
  }

  const firstSteps: Carry[] = [];

  function firstStep(carry: Carry, token: number): void {
    if (!firstSteps[token]) {
      firstSteps[token] = initialCarry();
      step(firstSteps[token], token);
    }
    for (let i = 0; i < L; i++) carry[i].set(firstSteps[token][i]);
  }

  function logits(carry: Carry): Float32Array {
    top.h.set(carry[L - 1]);
    output.set(bo);
    Wo.times(top.h, output);
    return output;
  }

  function stepToDifferentiate(carry: Carry, token: number): Step {
    const before = carry.map((h) => h.slice());
    step(carry, token);
    return layers.map((layer, i) => ({ h: before[i], a: layer.a.slice() }));
  }

  function embeddingGradients(steps: Step[], carry: Carry, target: number): Float32Array {
    const dlogits = softmax(logits(carry)); // of −ln softmax(logits)[target]
    dlogits[target] -= 1;
    output.set(dlogits);
    for (const layer of layers) layer.dh.fill(0);
    Wo.timesT(output, top.dh);

    const norms = new Float32Array(steps.length);
    for (let t = steps.length - 1; t >= 0; t--) {
      for (let i = L - 1; i >= 0; i--) {
        const { h, a } = steps[t][i];
        layers[i].stepGradient(h, a);
        if (i) layers[i].W.timesT(layers[i].da, layers[i - 1].dh);
      }
      x.fill(0);
      first.W.timesT(first.da, x);
      norms[t] = Math.hypot(...x);
    }
    return norms;
  }

  return {
    cell, H, L, V, vocabulary,
    numParams: [...tensors.values()].reduce((n, { data }) => n + data.length, 0),
    initialCarry, step, firstStep, logits, stepToDifferentiate, embeddingGradients,
  };
}

/** Return e^x / Σ e^x. */
export function softmax(x: Float32Array | Float64Array): Float64Array {
  const top = Math.max(...x);
  const p = Float64Array.from(x, (v) => Math.exp(v - top));
  const total = p.reduce((a, b) => a + b, 0);
  return p.map((v) => v / total);
}

/** Return −ln softmax(logits)[target], nats. */
export function nats(logits: Float32Array, target: number): number {
  let top = -Infinity;
  for (const v of logits) if (v > top) top = v;
  let total = 0;
  for (const v of logits) total += Math.exp(v - top);
  return Math.log(total) + top - logits[target];
}

interface Config {
  cell: "gru" | "rnn";
  embedding_dim: number;
  hidden_dim: number;
  num_layers: number;
  reset_gate: "before" | "after";
  tied_embedding: boolean;
}

function readConfig(metadata: Safetensors["metadata"]): Config {
  let model: Record<string, unknown>;
  try {
    model = parse(metadata.config).model as Record<string, unknown>;
    if (typeof model !== "object") throw Error();
  } catch {
    throw new Error("The model's file has no config, or it is broken.");
  }
  const { cell, reset_gate = "after", activation = "tanh" } = model;
  if (cell !== "gru" && cell !== "rnn") throw new Error(`The model's cell is ${cell}; it must be gru or rnn.`);
  if (reset_gate !== "before" && reset_gate !== "after")
    throw new Error(`The model's reset_gate is ${reset_gate}; it must be before or after.`);
  if (activation !== "tanh") throw new Error(`The model's activation is ${activation}; it must be tanh.`);
  if (model.final_norm) throw new Error("The model has a layer normalisation, which this page does not compute.");
  const size = (name: string) => {
    const n = model[name];
    if (!Number.isSafeInteger(n) || (n as number) < 1 || (n as number) > 2 ** 16)
      throw new Error(`The model's ${name} is ${n}; it must be from 1 to ${2 ** 16}.`);
    return n as number;
  };
  return {
    cell, reset_gate, tied_embedding: model.tied_embedding === true,
    embedding_dim: size("embedding_dim"), hidden_dim: size("hidden_dim"), num_layers: size("num_layers"),
  };
}

function readVocabulary(metadata: Safetensors["metadata"]): string[] {
  let characters: unknown;
  try {
    ({ characters } = JSON.parse(metadata.tokenizer_data));
  } catch {
    characters = null;
  }
  if (metadata.tokenizer !== "characters" || typeof characters !== "string")
    throw new Error("The model's tokens are not characters.");
  const vocabulary = [...characters];
  if (!vocabulary.length || vocabulary.length > 256)
    throw new Error(`The model's vocabulary has ${vocabulary.length} characters; it must have 1 to 256.`);
  return vocabulary;
}

/** Return the transpose of a matrix of so many rows. */
function transposed(M: Float32Array, rows: number): Float32Array {
  const columns = M.length / rows;
  return M.map((_, i) => M[(i % rows) * columns + Math.floor(i / rows)]);
}

function tensor(tensors: Safetensors["tensors"], name: string, shape: number[]): Float32Array {
  const found = tensors.get(name);
  if (!found) throw new Error(`The model's file lacks ${name}.`);
  if (found.shape.join() !== shape.join())
    throw new Error(`${name} has shape (${found.shape.join(", ")}); it must be (${shape.join(", ")}).`);
  return found.data;
}
