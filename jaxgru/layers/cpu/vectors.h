// Vectors of VL floats, and exp, σ and tanh of them. Included once per instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

typedef float V __attribute__((vector_size(VL * 4)));
typedef float Unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(VL * 4)));

INLINE V load(const float* p) { return *(const Unaligned*)p; }
INLINE void store(float* p, V v) { *(Unaligned*)p = v; }
INLINE V all(float x) { return x - (V){}; }

// The first n of VL floats: the end of a row
INLINE V load(const float* p, long n) {
  if (n >= VL) return load(p);
  float part[VL] = {};
  memcpy(part, p, n * sizeof(float));
  return load(part);
}
INLINE void store(float* p, V v, long n) {
  if (n >= VL) return store(p, v);
  float part[VL];
  store(part, v);
  memcpy(p, part, n * sizeof(float));
}

INLINE V reciprocal(V d) {  // of 1 … ∞, to about one unit in the last place
#if VL == 16
  V y = (V)_mm512_rcp14_ps((__m512)d);
  return y + y * (1.0f - d * y);
#elif VL == 8
  V y = (V)_mm256_rcp_ps((__m256)d);
  y = y + y * (1.0f - d * y);
  return y + y * (1.0f - d * y);
#else
  return 1.0f / d;
#endif
}

// exp(x) = 2ⁿ·exp(r) with n = round(x / ln 2); the polynomial for |r| ≤ ln 2 / 2 is that of Cephes
// (Moshier, expf). For |x| ≤ 87.
INLINE V exp_(V x) {
  const V rounding = all(12582912.0f);  // 1.5·2²³: the sum's last bits are n
  V t = x * 1.44269504f + rounding, n = t - rounding;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (V)(((Ints)t << 23) + 0x3f800000);
}

INLINE V clamp(V x) {  // to ±87; NaN stays NaN
  const V most = all(87.0f), least = all(-87.0f);
  x = x > most ? most : x;
  return x < least ? least : x;
}

INLINE V sigmoid(V x) { return reciprocal(1.0f + exp_(clamp(-x))); }

// Near zero, Cephes' odd polynomial (tanhf); elsewhere ±(1 − 2/(1 + exp(2|x|))), in which a rounding
// of the quotient counts little. σ and tanh are within 3 units in the last place of the exact values;
// those of σ below 2⁻¹²⁵ are between 0 and 2⁻¹²⁵.
INLINE V tanh_(V x) {
  V s = x * x;
  V p = s * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * s + -5.37397155531e-2f;
  p = p * s + 1.33314422036e-1f;
  p = p * s + -3.33332819422e-1f;
  p = p * (s * x) + x;
  const Ints sign = (Ints)x & (Ints)all(-0.0f);
  V far = 1.0f - 2.0f * reciprocal(1.0f + exp_(clamp((V)((Ints)(x + x) ^ sign))));
  return (V)((Ints)(s < 0.390625f ? p : far) | sign);
}

}  // namespace
