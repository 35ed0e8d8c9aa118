import type { Layer, LayerParams } from "./layer";
import type { Arena } from "./product";

/** The vanilla RNN, as in jaxgru/cells/rnn.py: h' = tanh(x·W + h·U + b). */
export function rnn(arena: Arena, p: LayerParams, E: number, H: number): Layer {
  const W = arena.matrix(E, p.matrix("W", E, H));
  const U = arena.matrix(H, p.matrix("U", H, H));
  const b = p.vector("b", H);
  const h = arena.vector(H);
  const a = arena.vector(H);

  function step(): void {
    U.times(h, a);
    for (let i = 0; i < H; i++) h[i] = a[i] = Math.tanh(a[i]);
  }

  // The gradient
  const dh = arena.vector(H);
  const da = arena.vector(H);

  function stepGradient(_h: Float32Array, a: Float32Array): void {
    for (let i = 0; i < H; i++) da[i] = dh[i] * (1 - a[i] * a[i]);
    dh.fill(0);
    U.timesT(da, dh);
  }

  return { H, h, a, W, b, step, dh, da, stepGradient };
}
