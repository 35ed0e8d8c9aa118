// The inner loops of all matrix products, and how their operands are packed.
//
// A weight is cut into panels of a few vectors of columns, stored in the order in which a product
// reads them:
//
//   weight (K, N)     columns of a panel: v₀ v₁ v₂, VL floats each
//   k = 0 │ a b c …    panel: a b c d e f g h i …      (zeros beyond N)
//   k = 1 │ d e f …
//   k = 2 │ g h i …
//
// A tile of MOST_ROWS rows times three vectors stays in registers while k runs over the panel.
#pragma once
#include "problem.h"
#include "vectors.h"

#define UNROLL _Pragma("GCC unroll 8")

namespace {

#if VL == 16 || defined(__aarch64__)
constexpr int MOST_ROWS = 8;  // 32 registers
#else
constexpr int MOST_ROWS = 4;  // 16 registers
#endif

template <int N>
struct Int {
  static constexpr int value = N;
};

// Calls f(Int<rows>, first row) for tiles of all rows
template <int MOST, class F>
INLINE void in_tiles(long rows, F f) {
  long i = 0;
  for (; i + MOST <= rows; i += MOST) f(Int<MOST>{}, i);
  if constexpr (MOST > 4)
    if (i + 4 <= rows) f(Int<4>{}, i), i += 4;
  if constexpr (MOST > 2)
    if (i + 2 <= rows) f(Int<2>{}, i), i += 2;
  if (i < rows) f(Int<1>{}, i);
}

// tile[i][j] += Σ_k A[i][k]·panel[k][j]. A row of A has K floats in `blocks` parts, `apart` from one
// another. Few rows need several chains of sums to keep the processor busy; MORE_CHAINS is false
// where the split into tiles depends on the number of threads, because results may not.
template <bool MORE_CHAINS, int R, int N>
INLINE void add_product(V (&tile)[R][N], const Rows A, const float* panel, long K, long blocks = 1,
                        long apart = 0) {
  constexpr int CHAINS = !MORE_CHAINS ? 1 : R == 1 ? 4 : R * N < 8 ? 2 : 1;
  V sums[CHAINS][R][N];
  UNROLL for (int u = 0; u < CHAINS; u++) UNROLL for (int i = 0; i < R; i++)
      UNROLL for (int j = 0; j < N; j++) sums[u][i][j] = u ? V{} : tile[i][j];
  for (long block = 0; block < blocks; block++) {
    const float* a[R];
    for (int i = 0; i < R; i++) a[i] = A[i] + block * apart;
    auto one = [&](V(&sum)[R][N], long k) __attribute__((always_inline)) {
      V b[N];
      UNROLL for (int j = 0; j < N; j++) b[j] = load(panel + j * VL);
      panel += N * VL;
      UNROLL for (int i = 0; i < R; i++) {
        V ai = all(a[i][k]);
        UNROLL for (int j = 0; j < N; j++) sum[i][j] += ai * b[j];
      }
    };
    long k = 0;
    for (; k + 4 <= K; k += 4) UNROLL for (int u = 0; u < 4; u++) one(sums[u % CHAINS], k + u);
    for (; k < K; k++) one(sums[0], k);
  }
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < N; j++) {
    V sum = sums[0][i][j];
    UNROLL for (int u = 1; u < CHAINS; u++) sum += sums[u][i][j];
    tile[i][j] = sum;
  }
}

// tile[i][j] += Σ_k left[k][i]·right[k][j]
template <int N>
INLINE void add_outer(V (&tile)[MOST_ROWS][N], const float* left, const float* right, long K) {
  _Pragma("GCC unroll 4") for (long k = 0; k < K; k++) {
    V b[N];
    UNROLL for (int j = 0; j < N; j++) b[j] = load(right + j * VL);
    UNROLL for (int i = 0; i < MOST_ROWS; i++) {
      V ai = all(left[i]);
      UNROLL for (int j = 0; j < N; j++) tile[i][j] += ai * b[j];
    }
    left += MOST_ROWS, right += N * VL;
  }
}

inline long blocks_of(long n, long size) { return (n + size - 1) / size; }

// One panel of a weight (K, ·) whose rows are `ld` apart: N vectors, each from a column of its own
inline void pack(float* panel, const float* weight, long ld, long K, long N, const long* columns,
                 const long* widths) {
  for (long k = 0; k < K; k++)
    for (long j = 0; j < N; j++, panel += VL)
      store(panel, load(weight + k * ld + columns[j], widths[j]));
}

// One panel of a weight's transpose: `width` ≤ N·VL rows of the weight become its columns. Its k
// counts the floats of a row of gradients, [block of units][gate][unit]; so do the weight's columns
// gate·H + unit.
inline void pack_transposed(float* panel, const float* weight, long ld, long width, long N, long H,
                            long gates, const long* first_columns) {
  const long blocks = blocks_of(H, VL);
  memset(panel, 0, blocks * gates * VL * N * VL * sizeof(float));
  for (long j = 0; j < width; j++)
    for (long block = 0; block < blocks; block++)
      for (long g = 0; g < gates; g++) {
        const float* from = weight + j * ld + first_columns[g] + block * VL;
        float* to = panel + (block * gates + g) * VL * N * VL + j;
        const long units = H - block * VL < VL ? H - block * VL : VL;
        for (long u = 0; u < units; u++) to[u * N * VL] = from[u];
      }
}

// Row k of a left factor, K rows in all: [block of MOST_ROWS columns][k][MOST_ROWS]
INLINE void pack_left(float* left, const float* row, long n, long k, long K) {
  float* to = left + k * MOST_ROWS;
  for (long m = 0; m < n; m += MOST_ROWS, to += K * MOST_ROWS) {
    if (m + MOST_ROWS <= n) {
      memcpy(to, row + m, MOST_ROWS * sizeof(float));
    } else {
      memset(to, 0, MOST_ROWS * sizeof(float));
      memcpy(to, row + m, (n - m) * sizeof(float));
    }
  }
}

}  // namespace
