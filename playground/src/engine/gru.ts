import { sigmoid, type Layer, type LayerParams } from "./layer";
import type { Arena } from "./product";

/**
 * The GRU, as in jaxgru/cells/gru.py:
 *
 *     z  = σ(x·Wz + h·Uz + bz)
 *     r  = σ(x·Wr + h·Ur + br)
 *     n  = tanh(x·Wn + (r ⊙ h)·Un + bn)           reset "before"
 *     n  = tanh(x·Wn + r ⊙ (h·Un + cn) + bn)      reset "after"
 *     h' = (1 − z) ⊙ h + z ⊙ n
 *
 * The gates lie side by side: z, r, n.
 */
export function gru(arena: Arena, p: LayerParams, E: number, H: number, resetGate: "before" | "after"): Layer {
  const W = arena.matrix(E, p.matrix("W", E, 3 * H));
  const U = p.matrix("U", H, 3 * H);
  const [Uzr, Un] = [arena.matrix(H, U, 0, 2 * H), arena.matrix(H, U, 2 * H)];
  const c = p.has("c") ? p.vector("c", 2 * H) : new Float32Array(2 * H);
  const b = p.vector("b", 3 * H).map((x, i) => x + (c[i] ?? 0));
  const cn = p.has("cn") ? p.vector("cn", H) : new Float32Array(H);

  const h = arena.vector(H);
  const a = arena.vector(3 * H);
  const a_zr = a.subarray(0, 2 * H);
  const a_n = a.subarray(2 * H);
  const rh = arena.vector(H);
  const m = arena.vector(H);

  function step(): void {
    Uzr.times(h, a_zr);
    for (let i = 0; i < 2 * H; i++) a[i] = sigmoid(a[i]);
    if (resetGate === "before") {
      for (let i = 0; i < H; i++) rh[i] = a[H + i] * h[i];
      Un.times(rh, a_n);
    } else {
      m.set(cn);
      Un.times(h, m);
      for (let i = 0; i < H; i++) a_n[i] += a[H + i] * m[i];
    }
    for (let i = 0; i < H; i++) {
      const z = a[i];
      const n = (a_n[i] = Math.tanh(a_n[i]));
      h[i] = (1 - z) * h[i] + z * n;
    }
  }

  // The gradient
  const dh = arena.vector(H);
  const da = arena.vector(3 * H);
  const da_zr = da.subarray(0, 2 * H);
  const da_n = arena.vector(H);
  const d_rh = arena.vector(H);

  function stepGradient(h: Float32Array, a: Float32Array): void {
    for (let i = 0; i < H; i++) {
      const z = a[i];
      const n = a[2 * H + i];
      da_n[i] = dh[i] * z * (1 - n * n);
      da[i] = dh[i] * (n - h[i]) * z * (1 - z);
      da[2 * H + i] = da_n[i];
      dh[i] *= 1 - z;
    }
    d_rh.fill(0);
    if (resetGate === "before") {
      Un.timesT(da_n, d_rh);
      for (let i = 0; i < H; i++) {
        const r = a[H + i];
        da[H + i] = d_rh[i] * h[i] * r * (1 - r);
        dh[i] += d_rh[i] * r;
      }
    } else {
      rh.set(h); // where the product can read it
      m.set(cn);
      Un.times(rh, m);
      for (let i = 0; i < H; i++) {
        const r = a[H + i];
        da[H + i] = da_n[i] * m[i] * r * (1 - r);
        da_n[i] *= r;
      }
      Un.timesT(da_n, dh);
    }
    Uzr.timesT(da_zr, dh);
  }

  return { H, h, a, W, b, step, dh, da, stepGradient };
}
