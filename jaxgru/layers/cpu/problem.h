// What one call computes: a recurrent layer over T steps of B rows, with E features and H units.
//
// Every array is float32 and belongs to XLA, unless said otherwise. A null pointer is an absent one.
#pragma once
#include <cstddef>
#include <cstdint>

// No function here may exist by itself: the linker would keep one of those that were compiled for
// different instruction sets
#define ALWAYS_INLINE inline __attribute__((always_inline))

struct Rows {  // the rows of a matrix, or of one step of a sequence
  float* first = nullptr;
  long stride = 0;
  ALWAYS_INLINE float* operator[](long i) const { return first + i * stride; }
  ALWAYS_INLINE Rows from(long i) const { return {first + i * stride, stride}; }
  ALWAYS_INLINE explicit operator bool() const { return first; }
};

struct Sequence {  // (T, B, n) or (B, T, n)
  float* first = nullptr;
  long step = 0, row = 0;
  ALWAYS_INLINE Rows operator[](long t) const { return {first + t * step, row}; }
  ALWAYS_INLINE explicit operator bool() const { return first; }
};

enum class Kind { RNN, LSTM, GRU_BEFORE, GRU_AFTER };

struct Problem {
  Kind kind;
  long T, B, E, H, V;  // V rows of the table; 0: x is given, else E is 0
  bool reverse, save;  // save: keep what the backward pass needs

  // x·W + b of a step is computed from x (T, B, E), or looked up: row ids[t, i] of table (V, G·H)
  Sequence x;
  const int32_t* ids;
  const float *table, *W, *b;
  const float *U, *Un, *cn;  // (H, G·H); GRU_BEFORE: (H, 2H) and (H, H); GRU_AFTER: cn (H)

  const float *h0, *c0;              // (B, H)
  const float *h_reset, *c_reset;    // (B, H): the state that a reset sets; null: zeros
  const bool *reset, *real, *keep;   // (T, B), (T, B), (T, B, H)
  float scale;                       // of what `keep` keeps

  Sequence y, c;  // h and c after each step
  float* c_last;  // (B, H), in place of c
  float* saved;   // (T, B, saved_floats)

  // The backward pass only: gradients given ...
  Sequence dy, dc;
  const float *dh_last, *dc_last;
  // ... and computed
  Sequence dx;
  float *dtable, *dW, *db, *dU, *dUn, *dcn, *dh0, *dc0, *dh_reset, *dc_reset;

  ALWAYS_INLINE long at(long s) const { return reverse ? T - 1 - s : s; }  // the s-th step that is computed
};

class Team;

struct Kernel {  // what each instruction set provides
  const char* name;
  long (*saved_floats)(Kind, long H);  // per step and row
  bool (*forward)(const Problem&, Team&);  // false: no memory
  bool (*backward)(const Problem&, Team&);
  void (*gates)(const float* x, float* tanh, float* sigmoid, long n);
  double (*peak)(long repeats);  // GFLOP/s of the products' inner loop, on one core
};
