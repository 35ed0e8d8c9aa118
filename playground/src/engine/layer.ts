import type { Matrix } from "./product";

/** A recurrent layer: one step, and its gradient. Letters: E input size, H hidden size, G numbers of the gates. */
export interface Layer {
  readonly H: number;
  /** The state (H,): `step` replaces it by the next one. */
  readonly h: Float32Array;
  /** x·W + b of the gates (G,): `step` replaces it by the gates' values. */
  readonly a: Float32Array;
  readonly W: Matrix; // (E, G)
  readonly b: Float32Array; // (G,)

  /** The gradient of the state (H,): after a step, before it. */
  readonly dh: Float32Array;
  /** The gradient of x·W + b (G,). */
  readonly da: Float32Array;

  step(): void;
  /** Compute dh and da from dh, the state before a step, and the gates' values in it. */
  stepGradient(h: Float32Array, a: Float32Array): void;
}

/** The parameters of a layer, by their names in jaxgru; the shape is checked. */
export interface LayerParams {
  matrix(name: string, rows: number, columns: number): Float32Array;
  vector(name: string, length: number): Float32Array;
  has(name: string): boolean;
}

export const sigmoid = (x: number) => 1 / (1 + Math.exp(-x));
