/**
 * What the page asks of the models. The engine runs in a worker; each call is a pure function of its
 * arguments, and the state is an argument and a result, as in jaxgru.
 *
 * A call that can take long has a `slot`, any name. A newer call with the same slot ends it: its promise is
 * then rejected with an error whose name is "AbortError". All other errors are for the reader, one sentence
 * each, in `message`.
 */

export type ModelName = "astra_alpha" | "astra_beta" | "elman_alpha";

/** The carry: one hidden state (H,) per layer. */
export type Carry = Float32Array[];

export interface ModelInfo {
  name: ModelName;
  cell: "gru" | "rnn";
  hiddenDim: number;
  numLayers: number;
  numParams: number;
  bytes: number;
  /** The characters, by token. */
  vocabulary: string[];
}

/** A text that is being written: all that the next character depends on. */
export interface Writing {
  carry: Carry;
  /** The last token: read by the model before the next one is drawn. */
  last: number;
  /** Tokens read since the state was last zero. */
  sinceReset: number;
  /** The seed of the draws, and how many there were: two writings of one seed share each draw. */
  seed: number;
  draws: number;
}

export interface SamplingOptions {
  /** 0 takes the most likely character. */
  temperature: number;
  /** null: all characters. */
  topK: number | null;
  /** The state is set to zero before a token is read if this many were read since it was zero. 1: before
   * each token; null: never. */
  resetEvery: number | null;
}

export interface Encoded {
  tokens: Uint8Array;
  /** Characters outside the vocabulary, each once, which `tokens` leaves out. */
  unknown: string[];
  /** For each token, its index (UTF-16) in the text. */
  offsets: Uint32Array;
}

/** One layer's step: the state before it and after it (H,), and the gates' values (a GRU's z, r and n side by side). */
export interface LayerStep {
  before: Float32Array;
  gates: Float32Array;
  after: Float32Array;
}

export interface UnitInfo {
  /** Index in the concatenated states of all layers. */
  unit: number;
  layer: number;
  /** What it follows, e.g. "position in the line". */
  follows: string;
  /** Its correlation with that over the validation text. */
  correlation: number;
}

export interface Engine {
  /** Load a model (once) and describe it. */
  load(name: ModelName): Promise<ModelInfo>;
  encode(name: ModelName, text: string): Promise<Encoded>;
  /** Read all of the prompt but its last token, which is drawn on by `write`. */
  start(name: ModelName, tokens: Uint8Array, seed: number, resetEvery: number | null, carry?: Carry, slot?: string): Promise<Writing>;
  /** Write `n` tokens, and return them with what comes next: n and n more are the same as 2·n. */
  write(name: ModelName, writing: Writing, n: number, options: SamplingOptions): Promise<{ tokens: Uint8Array; writing: Writing }>;
  /** The probabilities from which `write` would draw the next token. (V,) */
  next(name: ModelName, writing: Writing, options: SamplingOptions): Promise<Float64Array>;
  /** Nats of each token but the first, given those before it since the last reset. (T − 1,) */
  surprise(name: ModelName, tokens: Uint8Array, resetEvery: number | null, slot?: string): Promise<Float32Array>;
  /** The same by the bigram counted in the training text (smoothed: no character is impossible). */
  bigramSurprise(tokens: Uint8Array): Promise<Float32Array>;
  /** Mean nats per token for each number of tokens between two resets; called back as each is ready. */
  memoryCurve(name: ModelName, tokens: Uint8Array, resets: (number | null)[], onPoint: (reset: number | null, nats: number) => void, slot?: string): Promise<void>;
  /** The states after each token: (T, units of all layers), row by row. */
  states(name: ModelName, tokens: Uint8Array, resetEvery: number | null, slot?: string): Promise<Float32Array>;
  /** What each layer does when it reads the last token. */
  step(name: ModelName, tokens: Uint8Array): Promise<LayerStep[]>;
  units(name: ModelName): Promise<UnitInfo[]>;
  /** Norm of the gradient of token `at`'s nats with respect to the embedding of each token before it. (at,) */
  reach(name: ModelName, tokens: Uint8Array, at: number, resetEvery: number | null, slot?: string): Promise<Float32Array>;
  /** The state after all tokens. */
  read(name: ModelName, tokens: Uint8Array, resetEvery: number | null, carry?: Carry, slot?: string): Promise<Carry>;
}
