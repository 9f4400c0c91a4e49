// Arithmetic on vectors as wide as the instruction set this file is compiled for. One copy is compiled for each set, so
// everything here is always inlined: a shared out-of-line copy might be one that the machine cannot run.
#pragma once

#include "../math/numbers.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANE_BYTES = 64;
#elif defined(__AVX2__)
constexpr int LANE_BYTES = 32;
#else
constexpr int LANE_BYTES = 16;
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float FloatLanes __attribute__((vector_size(LANE_BYTES)));
typedef int32_t IntLanes __attribute__((vector_size(LANE_BYTES)));
typedef uint32_t WordLanes __attribute__((vector_size(LANE_BYTES)));
typedef uint16_t HalfLanes __attribute__((vector_size(LANE_BYTES / 2)));
typedef double DoubleLanes __attribute__((vector_size(LANE_BYTES)));

template <class T>
struct LanesOf;
template <>
struct LanesOf<float> {
  using type = FloatLanes;
};
template <>
struct LanesOf<double> {
  using type = DoubleLanes;
};

template <class T>
constexpr int WIDTH = LANE_BYTES / sizeof(T);

template <class V, class T>
INLINE V load_lanes(const T* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <class V, class T>
INLINE void store_lanes(T* to, V v) {
  memcpy(to, &v, sizeof(V));
}

// exp(x) for x <= 0 to 1 ulp; 0 below -86, NaN for NaN. exp(x) = 2^n exp(r) with |r| <= log(2) / 2.
INLINE FloatLanes exp_of_negative(FloatLanes x) {
  const float LOWEST = -86.0f, ROUND = 0x1.8p23f;
  FloatLanes bounded = x < LOWEST ? FloatLanes{} + LOWEST : x;
  FloatLanes shifted = bounded * 1.44269504088896341f + ROUND;  // the integer n stands in its low bits
  FloatLanes n = shifted - ROUND;
  FloatLanes r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  FloatLanes p = FloatLanes{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  FloatLanes scale = (FloatLanes)(((IntLanes)shifted << 23) + 0x3f800000);
  return x < LOWEST ? FloatLanes{} : p * scale;
}

INLINE DoubleLanes exp_of_negative(DoubleLanes x) {
  for (int i = 0; i < WIDTH<double>; i++) x[i] = std::exp(x[i]);
  return x;
}

// Conversion between memory and lanes of the accumulating type.
INLINE FloatLanes widen(const float* from) { return load_lanes<FloatLanes>(from); }
INLINE DoubleLanes widen(const double* from) { return load_lanes<DoubleLanes>(from); }

INLINE FloatLanes widen(const BF16* from) {
#ifdef __AVX512F__  // GCC 12 converts in two halves by itself, and warns of the intrinsics without a mask
  WordLanes word = (WordLanes)_mm512_maskz_cvtepu16_epi32(0xffff, load_lanes<__m256i>(from));
#else
  WordLanes word = __builtin_convertvector(load_lanes<HalfLanes>(from), WordLanes);
#endif
  return (FloatLanes)(word << 16);
}

INLINE FloatLanes widen(const F16* from) {
#ifdef __AVX512F__
  return (FloatLanes)_mm512_maskz_cvtph_ps(0xffff, load_lanes<__m256i>(from));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(load_lanes<__m128i>(from));
#else  // numbers.h tells how
  WordLanes word = __builtin_convertvector(load_lanes<HalfLanes>(from), WordLanes) << 16;
  WordLanes sign = word & 0x80000000u, doubled = word + word;
  FloatLanes normal = (FloatLanes)((doubled >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  FloatLanes subnormal = (FloatLanes)((doubled >> 17) | (126u << 23)) - 0.5f;
  return (FloatLanes)(sign | (WordLanes)(doubled < (1u << 27) ? subnormal : normal));
#endif
}

INLINE void narrow(float* to, FloatLanes x) { store_lanes(to, x); }
INLINE void narrow(double* to, DoubleLanes x) { store_lanes(to, x); }

INLINE void narrow(BF16* to, FloatLanes x) {
  WordLanes word = (WordLanes)x;
  WordLanes rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  rounded = (x == x) ? rounded : WordLanes{} + 0x7fc0u;
#ifdef __AVX512F__
  store_lanes(to, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)rounded));
#else
  store_lanes(to, __builtin_convertvector(rounded, HalfLanes));
#endif
}

INLINE void narrow(F16* to, FloatLanes x) {
#ifdef __AVX512F__
  store_lanes(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  store_lanes(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < WIDTH<float>; i++) to[i] = stored<F16>(x[i]);
#endif
}
