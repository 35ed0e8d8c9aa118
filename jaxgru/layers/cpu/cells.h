// The equations of each cell, forward and backward, for a tile of rows and a block of VL units.
//
// A row of gates, or of their gradients, is [block of units][gate][VL], so that what a block needs
// lies together. A cell says:
//   GATES    products with W, in the order of its columns
//   SAVED    what a step leaves for the backward pass, in this order
//   GRADIENTS  what the backward pass computes of a step: gradients of pre-activations
//   W_OF, U_OF  the gradients that belong to the columns of W, and of U
//   TILE     rows of a tile
#pragma once
#include "products.h"

namespace {

struct Step {  // one step of some rows: h and c before it, and where to write what follows
  Rows a;      // x·W + b: row i, or row ids[i]
  const int32_t* ids;
  long vocabulary;
  Rows h, c, h_next, c_next, saved, reset_h;  // reset_h: r ⊙ h, with the gate before the product

  const float* input(long i) const {
    if (!ids) return a[i];
    const uint32_t id = ids[i];
    return a[id < vocabulary ? id : vocabulary];  // the row after the last one is NaN
  }
};

struct BackStep {  // one step of the backward pass; dh and dc: of the state after it, then before it
  Rows h, c, c_after, saved, dy, dh, dc, d, reset_h;
};

struct Packed {  // weights of the recurrence in panels, one after another: see `pass.cc`
  const float *U, *Un, *cn;
};

struct Rnn {
  static constexpr int W_OF[] = {0}, U_OF[] = {0};
  static constexpr int GATES = 1, SAVED = 1, GRADIENTS = 1, TILE = MOST_ROWS;

  // h' = tanh(a + h·U)
  template <int R>
  INLINE void forward(const Packed& w, const Step& s, long H, long block, long i0) {
    const long u = block * VL;
    V tile[R][1];
    for (int i = 0; i < R; i++) tile[i][0] = load(s.input(i0 + i) + u);
    add_product<true>(tile, s.h.from(i0), w.U + block * H * VL, H);
    for (int i = 0; i < R; i++) {
      V h = tanh_(tile[i][0]);
      store(s.h_next[i0 + i] + u, h);
      if (s.saved) store(s.saved[i0 + i] + u, h);
    }
  }

  INLINE void backward(const BackStep& s, long i, long block) {
    const long u = block * VL;
    V h = load(s.saved[i] + u), dh = load(s.dh[i] + u) + load(s.dy[i] + u);
    store(s.d[i] + u, dh * (1.0f - h * h));
    store(s.dh[i] + u, V{});
  }
};

struct Lstm {
  static constexpr int W_OF[] = {0, 1, 2, 3}, U_OF[] = {0, 1, 2, 3};
  static constexpr int GATES = 4, SAVED = 4, GRADIENTS = 4, TILE = MOST_ROWS / 2;

  // f, i, o = σ(·), g = tanh(·), c' = f ⊙ c + i ⊙ g, h' = o ⊙ tanh(c')
  template <int R>
  INLINE void forward(const Packed& w, const Step& s, long H, long block, long i0) {
    const long u = block * VL;
    V tile[R][4];
    for (int i = 0; i < R; i++)
      UNROLL for (int g = 0; g < 4; g++) tile[i][g] = load(s.input(i0 + i) + u * 4 + g * VL);
    add_product<true>(tile, s.h.from(i0), w.U + block * H * 4 * VL, H);
    for (int i = 0; i < R; i++) {
      V f = sigmoid(tile[i][0]), in = sigmoid(tile[i][1]), o = sigmoid(tile[i][2]);
      V g = tanh_(tile[i][3]);
      V c = f * load(s.c[i0 + i] + u) + in * g;
      store(s.c_next[i0 + i] + u, c);
      store(s.h_next[i0 + i] + u, o * tanh_(c));
      if (float* to = s.saved ? s.saved[i0 + i] + u * 4 : nullptr)
        store(to, f), store(to + VL, in), store(to + 2 * VL, o), store(to + 3 * VL, g);
    }
  }

  INLINE void backward(const BackStep& s, long row, long block) {
    const long u = block * VL;
    const float* from = s.saved[row] + u * 4;
    V f = load(from), i = load(from + VL), o = load(from + 2 * VL), g = load(from + 3 * VL);
    V dh = load(s.dh[row] + u) + load(s.dy[row] + u), tanh_c = tanh_(load(s.c_after[row] + u));
    V dc = load(s.dc[row] + u) + dh * o * (1.0f - tanh_c * tanh_c);
    float* d = s.d[row] + u * 4;
    store(d, dc * load(s.c[row] + u) * f * (1.0f - f));
    store(d + VL, dc * g * i * (1.0f - i));
    store(d + 2 * VL, dh * tanh_c * o * (1.0f - o));
    store(d + 3 * VL, dc * i * (1.0f - g * g));
    store(s.dc[row] + u, dc * f);
    store(s.dh[row] + u, V{});
  }
};

struct GruAfter {  // saved: z r n m; gradients of m z r n
  static constexpr int W_OF[] = {1, 2, 3}, U_OF[] = {1, 2, 0};
  static constexpr int GATES = 3, SAVED = 4, GRADIENTS = 4, TILE = MOST_ROWS;

  // z, r = σ(·), m = h·Un + cn, n = tanh(a_n + r ⊙ m), h' = (1 − z) ⊙ h + z ⊙ n
  template <int R>
  INLINE void forward(const Packed& w, const Step& s, long H, long block, long i0) {
    const long u = block * VL;
    V tile[R][3];
    for (int i = 0; i < R; i++) {
      const float* a = s.input(i0 + i) + u * 3;
      tile[i][0] = load(a), tile[i][1] = load(a + VL), tile[i][2] = load(w.cn + u);
    }
    add_product<true>(tile, s.h.from(i0), w.U + block * H * 3 * VL, H);
    for (int i = 0; i < R; i++) {
      V z = sigmoid(tile[i][0]), r = sigmoid(tile[i][1]), m = tile[i][2];
      V n = tanh_(load(s.input(i0 + i) + u * 3 + 2 * VL) + r * m);
      store(s.h_next[i0 + i] + u, (1.0f - z) * load(s.h[i0 + i] + u) + z * n);
      if (float* to = s.saved ? s.saved[i0 + i] + u * 4 : nullptr)
        store(to, z), store(to + VL, r), store(to + 2 * VL, n), store(to + 3 * VL, m);
    }
  }

  INLINE void backward(const BackStep& s, long i, long block) {
    const long u = block * VL;
    const float* from = s.saved[i] + u * 4;
    V z = load(from), r = load(from + VL), n = load(from + 2 * VL), m = load(from + 3 * VL);
    V dh = load(s.dh[i] + u) + load(s.dy[i] + u);
    V dn = dh * z * (1.0f - n * n), dm = dn * r;
    float* d = s.d[i] + u * 4;
    store(d, dm);
    store(d + VL, dh * (n - load(s.h[i] + u)) * z * (1.0f - z));
    store(d + 2 * VL, dm * m * (1.0f - r));
    store(d + 3 * VL, dn);
    store(s.dh[i] + u, dh * (1.0f - z));
  }
};

struct GruBefore {  // saved: z r n; gradients of z r n
  static constexpr int W_OF[] = {0, 1, 2}, U_OF[] = {0, 1};
  static constexpr int GATES = 3, SAVED = 3, GRADIENTS = 3, TILE = MOST_ROWS;

  // z, r = σ(·), and r ⊙ h, of all blocks, before ...
  template <int R>
  INLINE void forward(const Packed& w, const Step& s, long H, long block, long i0) {
    const long u = block * VL;
    V tile[R][2];
    for (int i = 0; i < R; i++) {
      const float* a = s.input(i0 + i) + u * 3;
      tile[i][0] = load(a), tile[i][1] = load(a + VL);
    }
    add_product<true>(tile, s.h.from(i0), w.U + block * H * 2 * VL, H);
    for (int i = 0; i < R; i++) {
      V z = sigmoid(tile[i][0]), r = sigmoid(tile[i][1]);
      float* to = s.saved[i0 + i] + u * 3;
      store(to, z), store(to + VL, r);
      store(s.reset_h[i0 + i] + u, r * load(s.h[i0 + i] + u));
    }
  }

  // ... n = tanh(a_n + (r ⊙ h)·Un), h' = (1 − z) ⊙ h + z ⊙ n of N blocks
  template <int N, int R>
  INLINE void candidate(const Packed& w, const Step& s, long H, long block, long i0) {
    V tile[R][N];
    for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < N; j++)
          tile[i][j] = load(s.input(i0 + i) + (block + j) * 3 * VL + 2 * VL);
    add_product<true>(tile, s.reset_h.from(i0), w.Un + block * H * VL, H);
    for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < N; j++) {
        const long u = (block + j) * VL;
        float* to = s.saved[i0 + i] + u * 3;
        V z = load(to), n = tanh_(tile[i][j]);
        store(s.h_next[i0 + i] + u, (1.0f - z) * load(s.h[i0 + i] + u) + z * n);
        store(to + 2 * VL, n);
      }
  }

  INLINE void backward(const BackStep& s, long i, long block) {
    const long u = block * VL;
    const float* from = s.saved[i] + u * 3;
    V z = load(from), n = load(from + 2 * VL), dh = load(s.dh[i] + u) + load(s.dy[i] + u);
    store(s.d[i] + u * 3, dh * (n - load(s.h[i] + u)) * z * (1.0f - z));
    store(s.d[i] + u * 3 + 2 * VL, dh * z * (1.0f - n * n));
    store(s.dh[i] + u, dh * (1.0f - z));
  }

  // The gradient of r ⊙ h, of N blocks; then those of r and h
  template <int N, int R>
  INLINE void through_reset(const Packed& w, const BackStep& s, long H, long block, long i0) {
    V tile[R][N] = {};
    const Rows dn = {s.d[i0] + 2 * VL, s.d.stride};
    add_product<true>(tile, dn, w.Un + block * blocks_of(H, VL) * VL * VL, VL, blocks_of(H, VL),
                      3 * VL);
    for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < N; j++) {
        const long u = (block + j) * VL;
        V r = load(s.saved[i0 + i] + u * 3 + VL), rh = r * load(s.h[i0 + i] + u);
        store(s.reset_h[i0 + i] + u, rh);
        store(s.d[i0 + i] + u * 3 + VL, tile[i][j] * (rh - rh * r));
        store(s.dh[i0 + i] + u, load(s.dh[i0 + i] + u) + tile[i][j] * r);
      }
  }
};

}  // namespace
