// The pass over time, forward and backward. Compiled once per instruction set: VL floats a vector.
//
// Forward, a thread takes some rows through all steps. Backward, every few steps:
//
//   rows:     each thread takes some rows back through these steps; gradients of pre-activations
//             go to `d` (steps × rows, ...), and x and h, packed as left factors, beside it
//   columns:  each thread takes some columns of the weights' gradients: left factorᵀ · d, in a
//             sum that stays packed until all steps are done
//
// No sum depends on how many threads there are.
#include <cstdlib>
#include <ctime>

#include "cells.h"
#include "team.h"

namespace {

class Memory {  // scratch of one call
  void* blocks[32];
  int count = 0;

 public:
  bool failed = false;
  ~Memory() {
    while (count) free(blocks[--count]);
  }
  float* take(size_t floats) {  // a pointer that is only valid if nothing has failed
    void* block = nullptr;
    // + 256: that not all begin at multiples of 4,096
    if (count == 32 || posix_memalign(&block, 4096, (floats + 64) * sizeof(float) + 256 * count)) {
      failed = true;
      return nullptr;
    }
    blocks[count] = block;
    return (float*)((char*)block + 256 * count++);
  }
  float* zeros(size_t floats) {
    float* p = take(floats);
    if (p) memset(p, 0, floats * sizeof(float));
    return p;
  }
};

INLINE void copy(float* to, const float* from, long n) { memcpy(to, from, n * sizeof(float)); }
INLINE void clear(float* to, long n) { memset(to, 0, n * sizeof(float)); }
INLINE void add(float* to, const float* from, long n) {
  for (long i = 0; i < n; i++) to[i] += from[i];
}
// h · scale where it is kept, else 0
INLINE void drop(float* __restrict h, const bool* __restrict keep, float scale, long n) {
  const auto* kept = (const uint8_t*)keep;
  for (long i = 0; i < n; i++) h[i] = kept[i] ? h[i] * scale : 0.0f;
}
INLINE void add_and_drop(float* __restrict h, const float* __restrict more,
                         const bool* __restrict keep, float scale, long n) {
  const auto* kept = (const uint8_t*)keep;
  for (long i = 0; i < n; i++) h[i] = kept[i] ? (h[i] + more[i]) * scale : 0.0f;
}
INLINE long at_most(long a, long b) { return a < b ? a : b; }

template <class Cell>
struct Pass {
  static constexpr int G = Cell::GATES, D = Cell::GRADIENTS, S = Cell::SAVED;
  static constexpr int PACKED_TOGETHER = 2;  // blocks of units in a panel of a transposed weight
  static constexpr bool LSTM = std::is_same_v<Cell, Lstm>;
  static constexpr bool BEFORE = std::is_same_v<Cell, GruBefore>;
  static constexpr bool AFTER = std::is_same_v<Cell, GruAfter>;

  const Problem& p;
  Team& team;
  Memory memory;
  const long T = p.T, B = p.B, E = p.E, H = p.H, blocks = blocks_of(H, VL), Hp = blocks * VL;
  const bool odd = H != Hp;  // rows of H floats do not end with a vector
  // So few rows are one tile: then the threads divide the units of each step
  const bool few = B <= 8 && team.threads > 1 && H >= 128 && T > 4;
  Packed w{};

  Pass(const Problem& p, Team& team) : p(p), team(team) {}

  // Calls f(block, how many) for pairs of blocks of units
  template <class F>
  void in_pairs(long rows_of_task, F f) {
    (void)rows_of_task;
    const long pairs = blocks_of(blocks, 2);
    divided(pairs, [&](long pair) {
      if (2 * pair + 1 < blocks) f(Int<2>{}, 2 * pair);
      else f(Int<1>{}, 2 * pair);
    });
  }
  template <class F>
  void divided(long n, F f) {
    if (!few) {
      for (long i = 0; i < n; i++) f(i);
      return;
    }
    const long parts = at_most(team.threads, n);
    team.each(parts, [&](long part, int) {
      for (long i = n * part / parts; i < n * (part + 1) / parts; i++) f(i);
    });
  }

  long rows_of_task(long rows, long most) const {  // multiples of 8, about equal
    const long tiles = blocks_of(rows, 8), n = team.threads;
    const long tasks = n * blocks_of(tiles, n * (most / 8));
    return 8 * blocks_of(tiles, tasks);
  }

  // The columns of gate g in block b, and how many of them there are
  long column(long g, long b) const { return g * H + b * VL; }
  long width(long b) const { return at_most(VL, H - b * VL); }

  // --- The state before the s-th step of rows r0 …, padded and reset if need be
  bool is_reset(long t, long row) const {
    return p.reset && p.reset[t * B + row] && (!p.real || p.real[t * B + row]);
  }
  Rows state(Rows rows, const float* initial, long t, long r0, long R, Rows stage) const {
    bool any = false;
    for (long i = 0; p.reset && i < R; i++) any |= is_reset(t, r0 + i);
    if (!odd && !any) return rows;
    for (long i = 0; i < R; i++) {
      if (!is_reset(t, r0 + i)) copy(stage[i], rows[i], H);
      else if (initial) copy(stage[i], initial + (r0 + i) * H, H);
      else clear(stage[i], H);
    }
    return stage;
  }
  Rows padded(Rows rows, long R, Rows stage) const {
    if (!odd) return rows;
    for (long i = 0; i < R; i++) copy(stage[i], rows[i], H);
    return stage;
  }

  // --- Forward

  float *W = nullptr, *bias = nullptr, *table = nullptr, *a = nullptr;
  long steps_at_once = 1;

  void pack_gates(float* to, const float* weight, long K, long gates, long b) {
    long columns[4], widths[4];
    for (long g = 0; g < gates; g++) columns[g] = column(g, b), widths[g] = width(b);
    pack(to, weight, gates * H, K, gates, columns, widths);
  }

  bool forward() {
    const long R = rows_of_task(B, 64), gates_of_U = BEFORE ? 2 : G;
    steps_at_once = at_most(T, (H <= 128 ? 128 : 256) / at_most(R, B));
    if (steps_at_once < 1) steps_at_once = 1;
    const bool looked_up = p.ids;
    W = memory.take(looked_up ? 0 : E * G * Hp), bias = memory.take(G * Hp);
    table = memory.take(looked_up ? (p.V + 1) * G * Hp : 0);
    a = memory.take(looked_up ? 0 : team.threads * steps_at_once * R * G * Hp);
    float *U = memory.take(H * gates_of_U * Hp), *Un = memory.take(BEFORE ? H * Hp : 0);
    float *cn = memory.take(Hp), *stages = memory.zeros(4 * B * Hp);
    float *reset_h = memory.take(BEFORE ? B * Hp : 0), *gates = memory.take(BEFORE && !p.save ? B * S * Hp : 0);
    if (memory.failed) return false;
    team.each(blocks, [&](long b, int) {
      pack_gates(U + b * H * gates_of_U * VL, p.U, H, gates_of_U, b);
      if (!looked_up) {
        pack_gates(W + b * E * G * VL, p.W, E, G, b);
        pack_gates(bias + b * G * VL, p.b, 1, G, b);
      } else {
        for (long v = 0; v < p.V; v++)
          pack_gates(table + v * G * Hp + b * G * VL, p.table + v * G * H, 1, G, b);
        for (long j = 0; j < G * VL; j++) table[p.V * G * Hp + b * G * VL + j] = __builtin_nanf("");
      }
      if (BEFORE && b % 2 == 0) {
        const long columns[] = {b * VL, (b + 1) * VL}, widths[] = {width(b), b + 1 < blocks ? width(b + 1) : 0};
        pack(Un + b * H * VL, p.Un, H, H, at_most(2, blocks - b), columns, widths);
      }
      if (AFTER) store(cn + b * VL, load(p.cn + b * VL, width(b)));
    });
    w = {U, Un, cn};
    auto rows = [&](long r0, long R, int me) {
      Rows stage[4];
      for (int i = 0; i < 4; i++) stage[i] = {stages + (i * B + r0) * Hp, Hp};
      forward_rows(r0, R, a + me * steps_at_once * at_most(R, B) * G * Hp, stage,
                   {reset_h + r0 * Hp, Hp}, {gates + r0 * S * Hp, S * Hp});
    };
    if (few) rows(0, B, 0);
    else team.each(blocks_of(B, R), [&](long i, int me) { rows(i * R, at_most(R, B - i * R), me); });
    return true;
  }

  void forward_rows(long r0, long R, float* a, const Rows (&stage)[4], Rows reset_h, Rows gates) {
    Rows h = {(float*)p.h0 + r0 * H, H}, c = {(float*)p.c0 + r0 * H, H};
    for (long s0 = 0; s0 < T; s0 += steps_at_once) {
      const long steps = at_most(steps_at_once, T - s0), first = p.reverse ? T - s0 - steps : s0;
      if (!p.ids) inputs(first, steps, r0, R, a);
      for (long s = s0; s < s0 + steps; s++) {
        const long t = p.at(s);
        Step step{};
        if (p.ids) step.a = {table, G * Hp}, step.ids = p.ids + t * B + r0, step.vocabulary = p.V;
        else step.a = {a + (t - first) * R * G * Hp, G * Hp};
        const Rows y = p.y[t].from(r0), c_out = p.c ? p.c[t].from(r0) : Rows{};
        step.h = state(h, p.h_reset, t, r0, R, stage[0]);
        step.h_next = odd ? stage[1] : y;
        if (LSTM) {
          step.c = state(c, p.c_reset, t, r0, R, stage[2]);
          step.c_next = odd || !p.c ? stage[3] : c_out;
        }
        step.saved = p.save ? Rows{p.saved + (t * B + r0) * S * Hp, S * Hp} : BEFORE ? gates : Rows{};
        step.reset_h = reset_h;
        divided(blocks, [&](long b) {
          in_tiles<Cell::TILE>(R, [&](auto n, long i) __attribute__((always_inline)) {
            Cell::template forward<n.value>(w, step, H, b, i);
          });
        });
        if constexpr (BEFORE)
          in_pairs(R, [&](auto N, long b) {
            in_tiles<Cell::TILE>(R, [&](auto n, long i) __attribute__((always_inline)) {
              Cell::template candidate<N.value, n.value>(w, step, H, b, i);
            });
          });
        for (long i = 0; p.keep && i < R; i++)
          drop(step.h_next[i], p.keep + (t * B + r0 + i) * H, p.scale, H);
        for (long i = 0; p.real && i < R; i++)
          if (!p.real[t * B + r0 + i]) {
            copy(step.h_next[i], h[i], H);
            if (LSTM) copy(step.c_next[i], c[i], H);
          }
        // Where a state lies that the next step may overwrite is given back in rows of H floats
        if (odd)
          for (long i = 0; i < R; i++) copy(y[i], step.h_next[i], H);
        h = y;
        if (LSTM) {
          const Rows to = p.c ? c_out : Rows{p.c_last + r0 * H, H};
          if (step.c_next.first != to.first)
            for (long i = 0; i < R; i++) copy(to[i], step.c_next[i], H);
          c = to;
        }
      }
    }
  }

  // a = x·W + b of some steps, (steps × rows, G·Hp)
  void inputs(long first, long steps, long r0, long R, float* a) {
    const bool flat = R == B && p.x.step == B * p.x.row;  // the rows of all steps follow one another
    divided(blocks, [&](long b) {
      V bias_of[G];
      for (int g = 0; g < G; g++) bias_of[g] = load(bias + (b * G + g) * VL);
      for (long s = 0; s < (flat ? 1 : steps); s++) {
        const Rows x = p.x[first + s].from(r0), to = {a + s * R * G * Hp + b * G * VL, G * Hp};
        in_tiles<Cell::TILE>(flat ? steps * R : R, [&](auto n, long i) __attribute__((always_inline)) {
          V tile[n.value][G];
          UNROLL for (int r = 0; r < n.value; r++) UNROLL for (int g = 0; g < G; g++) tile[r][g] = bias_of[g];
          add_product<false>(tile, x.from(i), W + b * E * G * VL, E);
          UNROLL for (int r = 0; r < n.value; r++)
              UNROLL for (int g = 0; g < G; g++) store(to[i + r] + g * VL, tile[r][g]);
        });
      }
    });
  }

  // --- Backward

  // A gradient leftᵀ·d of a weight (M, columns · H), computed by groups of three vectors of columns.
  // `sums` is packed like this: [group][block of MOST_ROWS rows][row][vector]
  struct Gradient {
    const float* left;
    long M, vectors, gates;
    const int* gradient_of;  // per gate
    float *sums, *of_bias, *out, *bias_out;
    long columns;  // of `out`
    long groups() const { return blocks_of(vectors, 3); }
    long group_floats() const { return blocks_of(M, MOST_ROWS) * MOST_ROWS * 3 * VL; }
  };
  Gradient gradients[3];
  int count = 0;
  float *d = nullptr, *left_x = nullptr, *left_h = nullptr, *left_reset_h = nullptr, *W_t = nullptr;
  float *dh = nullptr, *dc = nullptr, *zero = nullptr, *passed = nullptr;
  Rows stage_h, stage_c, stage_c_after, stage_reset_h;

  void add_gradient(const float* left, long M, long gates, const int* of, float* out, long columns,
                    float* bias_out) {
    Gradient& g = gradients[count++];
    g = {left, M, blocks * gates, gates, of, nullptr, nullptr, out, bias_out, columns};
    g.sums = memory.zeros(g.groups() * g.group_floats());
    g.of_bias = memory.zeros(g.groups() * 3 * VL);
  }

  bool backward() {
    const bool looked_up = p.ids;
    const long chunks = blocks_of(B, 256), chunk = at_most(B, 8 * blocks_of(blocks_of(B, chunks), 8));
    steps_at_once = at_most(T, 256 / chunk);
    if (steps_at_once < 1) steps_at_once = 1;
    const long K = steps_at_once * chunk, panel = PACKED_TOGETHER * VL;
    const long E_panels = looked_up ? 0 : blocks_of(E, panel);
    d = memory.take(K * D * Hp);
    left_x = memory.take(looked_up ? 0 : K * (E + MOST_ROWS)), left_h = memory.take(K * (H + MOST_ROWS));
    left_reset_h = memory.take(BEFORE ? K * (H + MOST_ROWS) : 0);
    W_t = memory.take(E_panels * panel * G * Hp);
    float *U_t = memory.take((Hp + VL) * (BEFORE ? 2 : G) * Hp), *Un_t = memory.take(BEFORE ? (Hp + VL) * Hp : 0);
    float* right = memory.take(team.threads * K * 3 * VL);
    dh = memory.zeros(chunk * Hp), dc = memory.zeros(LSTM ? chunk * Hp : 0);
    zero = memory.zeros(Hp), passed = memory.take(p.real ? 2 * chunk * Hp : 0);
    float* stages = memory.zeros(4 * chunk * Hp);
    if (!looked_up) add_gradient(left_x, E, G, Cell::W_OF, p.dW, G * H, p.db);
    static constexpr int N_OF[] = {2};
    add_gradient(left_h, H, BEFORE ? 2 : G, Cell::U_OF, p.dU, (BEFORE ? 2 : G) * H, AFTER ? p.dcn : nullptr);
    if (BEFORE) add_gradient(left_reset_h, H, 1, N_OF, p.dUn, H, nullptr);
    if (memory.failed) return false;
    stage_h = {stages, Hp}, stage_c = {stages + chunk * Hp, Hp};
    stage_c_after = {stages + 2 * chunk * Hp, Hp}, stage_reset_h = {stages + 3 * chunk * Hp, Hp};

    // Transposed weights; their k follows the gradients in a row of d
    const long pairs = blocks_of(blocks, 2);
    long U_columns[4], W_columns[4];
    for (int g = 0; g < G; g++) W_columns[g] = g * H;
    for (int g = 0; g < G; g++) U_columns[g] = (AFTER ? (g + 2) % 3 : g) * H;  // m z r
    team.each(pairs + E_panels, [&](long i, int) {
      if (i < pairs) {
        const long b = 2 * i, N = at_most(2, blocks - b), u = b * VL, units = at_most(N * VL, H - u);
        const long gates = BEFORE ? 2 : G;
        pack_transposed(U_t + u * gates * Hp, p.U + u * gates * H, gates * H, units, N, H, gates, U_columns);
        if (BEFORE) pack_transposed(Un_t + u * Hp, p.Un + u * H, H, units, N, H, 1, U_columns);
      } else {
        const long e = (i - pairs) * panel;
        pack_transposed(W_t + e * G * Hp, p.W + e * G * H, G * H, at_most(panel, E - e), 2, H, G, W_columns);
      }
    });
    w = {U_t, Un_t, nullptr};
    if (p.dh_reset) clear(p.dh_reset, B * H);
    if (p.dc_reset) clear(p.dc_reset, B * H);
    if (looked_up) clear(p.dtable, p.V * G * H);

    for (long c0 = 0; c0 < B; c0 += chunk) {
      const long C = at_most(chunk, B - c0), R = rows_of_task(C, 256);
      for (long i = 0; i < C; i++) {
        copy(dh + i * Hp, p.dh_last + (c0 + i) * H, H);
        if (LSTM) copy(dc + i * Hp, p.dc_last + (c0 + i) * H, H);
      }
      for (long s1 = T; s1 > 0; s1 -= steps_at_once) {
        const long steps = at_most(steps_at_once, s1), s0 = s1 - steps;
        auto rows = [&](long r, long R) { backward_rows(c0, C, r, R, s0, steps); };
        if (few) rows(0, C);
        else team.each(blocks_of(C, R), [&](long i, int) { rows(i * R, at_most(R, C - i * R)); });
        long groups = 0, of_table = looked_up ? blocks : 0;
        for (int g = 0; g < count; g++) groups += gradients[g].groups();
        team.each(groups + of_table, [&](long i, int me) {
          if (i >= groups) return add_to_table(i - groups, c0, C, s0, steps);
          int g = 0;
          while (i >= gradients[g].groups()) i -= gradients[g++].groups();
          add_to_gradient(gradients[g], i, steps * C, right + me * K * 3 * VL);
        });
      }
      for (long i = 0; i < C; i++) {
        copy(p.dh0 + (c0 + i) * H, dh + i * Hp, H);
        if (LSTM) copy(p.dc0 + (c0 + i) * H, dc + i * Hp, H);
      }
    }
    for (int g = 0; g < count; g++)
      team.each(gradients[g].groups(), [&](long group, int) { unpack(gradients[g], group); });
    return true;
  }

  // Rows r … of the chunk at c0, back through steps s0 …
  void backward_rows(long c0, long C, long r, long R, long s0, long steps) {
    const long r0 = c0 + r, K = steps * C;
    auto of = [&](float* first) { return Rows{first + r * Hp, Hp}; };
    BackStep step{};
    step.dh = of(dh), step.dc = of(dc);
    const Rows passed_h = of(passed), passed_c = {passed_h.first + C * Hp, Hp};
    for (long s = s0 + steps - 1; s >= s0; s--) {
      const long t = p.at(s), before = s ? p.at(s - 1) : 0, k0 = (s - s0) * C + r;
      const Rows h = s ? p.y[before].from(r0) : Rows{(float*)p.h0 + r0 * H, H};
      step.h = state(h, p.h_reset, t, r0, R, of(stage_h.first));
      step.reset_h = of(stage_reset_h.first);
      step.saved = {p.saved + (t * B + r0) * S * Hp, S * Hp};
      step.d = {d + k0 * D * Hp, D * Hp};
      step.dy = p.dy[t].from(r0);
      if (LSTM) {
        const Rows c = s ? p.c[before].from(r0) : Rows{(float*)p.c0 + r0 * H, H};
        step.c = state(c, p.c_reset, t, r0, R, of(stage_c.first));
        step.c_after = padded(p.c[t].from(r0), R, of(stage_c_after.first));
        for (long i = 0; p.dc && i < R; i++) add(step.dc[i], p.dc[t][r0 + i], H);
      }
      if (odd || p.keep || p.real) {
        for (long i = 0; i < R; i++) {
          float* dh = step.dh[i];
          if (p.real && !p.real[t * B + r0 + i]) {
            copy(passed_h[i], dh, H), add(passed_h[i], step.dy[i], H), clear(dh, H);
            if (LSTM) copy(passed_c[i], step.dc[i], H), clear(step.dc[i], H);
          } else if (p.keep) {
            add_and_drop(dh, step.dy[i], p.keep + (t * B + r0 + i) * H, p.scale, H);
          } else {
            add(dh, step.dy[i], H);
          }
        }
        step.dy = {zero, 0};
      }
      if (few)
        divided(blocks, [&](long b) { for (long i = 0; i < R; i++) Cell::backward(step, i, b); });
      else
        for (long i = 0; i < R; i++)
          for (long b = 0; b < blocks; b++) Cell::backward(step, i, b);
      if constexpr (BEFORE)
        in_pairs(R, [&](auto N, long b) {
          in_tiles<MOST_ROWS>(R, [&](auto n, long i) __attribute__((always_inline)) {
            Cell::template through_reset<N.value, n.value>(w, step, H, b, i);
          });
        });
      constexpr int gates = BEFORE ? 2 : G;
      in_pairs(R, [&](auto N, long b) {
        in_tiles<MOST_ROWS>(R, [&](auto n, long i) __attribute__((always_inline)) {
          V tile[n.value][N.value];
          UNROLL for (int q = 0; q < n.value; q++)
              UNROLL for (int j = 0; j < N.value; j++) tile[q][j] = load(step.dh[i + q] + (b + j) * VL);
          add_product<true>(tile, step.d.from(i), w.U + b * VL * gates * Hp, gates * VL, blocks, D * VL);
          UNROLL for (int q = 0; q < n.value; q++)
              UNROLL for (int j = 0; j < N.value; j++) store(step.dh[i + q] + (b + j) * VL, tile[q][j]);
        });
      });
      for (long i = 0; i < R; i++) {
        pack_left(left_h, step.h[i], H, k0 + i, K);
        if (BEFORE) pack_left(left_reset_h, step.reset_h[i], H, k0 + i, K);
        if (is_reset(t, r0 + i)) {
          if (p.dh_reset) add(p.dh_reset + (r0 + i) * H, step.dh[i], H);
          clear(step.dh[i], Hp);
          if (LSTM) {
            if (p.dc_reset) add(p.dc_reset + (r0 + i) * H, step.dc[i], H);
            clear(step.dc[i], Hp);
          }
        }
        if (p.real && !p.real[t * B + r0 + i]) {
          copy(step.dh[i], passed_h[i], H);
          if (LSTM) copy(step.dc[i], passed_c[i], H);
        }
      }
    }
    if (p.ids) return;
    for (long s = s0; s < s0 + steps; s++)
      for (long i = 0; i < R; i++)
        pack_left(left_x, p.x[p.at(s)][r0 + i], E, (s - s0) * C + r + i, K);
    if (p.dx) input_gradients(c0, C, r, R, s0, steps);
  }

  // dx = d·Wᵀ
  void input_gradients(long c0, long C, long r, long R, long s0, long steps) {
    const bool flat = R == B && p.dx.step == B * p.dx.row && !p.reverse;
    const long panel = PACKED_TOGETHER * VL;
    divided(blocks_of(E, panel), [&](long j) {
      const long e = j * panel;
      for (long s = s0; s < (flat ? s0 + 1 : s0 + steps); s++) {
        const Rows from = {d + ((s - s0) * C + r) * D * Hp + (D - G) * VL, D * Hp};
        const Rows to = p.dx[p.at(s)].from(c0 + r);
        in_tiles<MOST_ROWS>(flat ? steps * R : R, [&](auto n, long i) __attribute__((always_inline)) {
          V tile[n.value][2] = {};
          add_product<false>(tile, from.from(i), W_t + e * G * Hp, G * VL, blocks, D * VL);
          for (int q = 0; q < n.value; q++)
            for (long v = 0; v < 2 && e + v * VL < E; v++)
              store(to[i + q] + e + v * VL, tile[q][v], E - e - v * VL);
        });
      }
    });
  }

  // The sums of three vectors of columns, over K rows of d
  void add_to_gradient(const Gradient& g, long group, long K, float* right) {
    const long N = at_most(3, g.vectors - group * 3);
    long from[3];
    for (long j = 0; j < N; j++) {
      const long v = group * 3 + j;
      from[j] = v / g.gates * D * VL + g.gradient_of[v % g.gates] * VL;
    }
    float* bias = g.of_bias + group * 3 * VL;
    V sum[3] = {};
    for (long k = 0; k < K; k++)
      for (long j = 0; j < N; j++) {
        V v = load(d + k * D * Hp + from[j]);
        sum[j] += v;
        store(right + (k * N + j) * VL, v);
      }
    for (long j = 0; j < N; j++) store(bias + j * VL, load(bias + j * VL) + sum[j]);
    auto tiles = [&](auto n) {
      float* sums = g.sums + group * g.group_floats();
      for (long m = 0; m < g.M; m += MOST_ROWS, sums += MOST_ROWS * 3 * VL) {
        V tile[MOST_ROWS][n.value];
        UNROLL for (int i = 0; i < MOST_ROWS; i++)
            UNROLL for (int j = 0; j < n.value; j++) tile[i][j] = load(sums + (i * 3 + j) * VL);
        add_outer(tile, g.left + m * K, right, K);
        UNROLL for (int i = 0; i < MOST_ROWS; i++)
            UNROLL for (int j = 0; j < n.value; j++) store(sums + (i * 3 + j) * VL, tile[i][j]);
      }
    };
    if (N == 3) tiles(Int<3>{});
    else if (N == 2) tiles(Int<2>{});
    else tiles(Int<1>{});
  }

  void unpack(const Gradient& g, long group) {
    for (long j = 0; j < 3 && group * 3 + j < g.vectors; j++) {
      const long v = group * 3 + j, gate = v % g.gates, b = v / g.gates;
      const float* sums = g.sums + group * g.group_floats() + j * VL;
      for (long m = 0; m < g.M; m++) store(g.out + m * g.columns + column(gate, b), load(sums + m * 3 * VL), width(b));
      const V bias = load(g.of_bias + (group * 3 + j) * VL);
      if (AFTER && g.out == p.dU) {
        if (gate == 2) store(g.bias_out + b * VL, bias, width(b));
      } else if (g.bias_out) {
        store(g.bias_out + column(gate, b), bias, width(b));
      }
    }
  }

  // The gradient of the table, of one block of units
  void add_to_table(long b, long c0, long C, long s0, long steps) {
    for (long s = s0; s < s0 + steps; s++)
      for (long i = 0; i < C; i++) {
        const uint32_t id = p.ids[p.at(s) * B + c0 + i];
        if (id >= p.V) continue;
        const float* from = d + ((s - s0) * C + i) * D * Hp + b * D * VL;
        for (int g = 0; g < G; g++) {
          float* to = p.dtable + (long)id * G * H + column(g, b);
          store(to, load(to, width(b)) + load(from + Cell::W_OF[g] * VL), width(b));
        }
      }
  }
};

template <class F>
bool by_kind(Kind kind, F f) {
  switch (kind) {
    case Kind::RNN: return f(Rnn{});
    case Kind::LSTM: return f(Lstm{});
    case Kind::GRU_BEFORE: return f(GruBefore{});
    default: return f(GruAfter{});
  }
}

bool forward(const Problem& p, Team& team) {
  return by_kind(p.kind, [&](auto cell) { return Pass<decltype(cell)>(p, team).forward(); });
}
bool backward(const Problem& p, Team& team) {
  return by_kind(p.kind, [&](auto cell) { return Pass<decltype(cell)>(p, team).backward(); });
}
long saved_floats(Kind kind, long H) {
  long saved = 0;
  by_kind(kind, [&](auto cell) { return (saved = decltype(cell)::SAVED), true; });
  return saved * blocks_of(H, VL) * VL;
}
void gates(const float* x, float* tanh, float* sigmoids, long n) {
  for (long i = 0; i < n; i += VL) {
    V v = load(x + i, n - i);
    store(tanh + i, tanh_(v), n - i), store(sigmoids + i, sigmoid(v), n - i);
  }
}
double peak(long repeats) {
  constexpr long K = 128;
  Memory memory;
  float *A = memory.zeros(MOST_ROWS * K), *panel = memory.zeros(3 * K * VL), *out = memory.zeros(MOST_ROWS * 3 * VL);
  if (memory.failed) return 0;
  timespec from, to;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
  for (long n = 0; n < repeats; n++) {
    V tile[MOST_ROWS][3];
    for (int i = 0; i < MOST_ROWS; i++) for (int j = 0; j < 3; j++) tile[i][j] = load(out + (i * 3 + j) * VL);
    add_product<true>(tile, Rows{A, K}, panel, K);
    for (int i = 0; i < MOST_ROWS; i++) for (int j = 0; j < 3; j++) store(out + (i * 3 + j) * VL, tile[i][j]);
  }
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
  return repeats * 2.0 * MOST_ROWS * 3 * VL * K / ((to.tv_sec - from.tv_sec) * 1e9 + to.tv_nsec - from.tv_nsec);
}

}  // namespace

#define JOINED(a, b) a##b
#define KERNEL(name) JOINED(kernel_, name)
#define TEXT(name) #name
#define NAME(name) TEXT(name)
extern const Kernel KERNEL(ISA) = {NAME(ISA), saved_floats, forward, backward, gates, peak};
