// Stored number types and their conversion to float, the same on the host and on a device. No torch, no CUDA headers needed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

template <class T>
constexpr T NEGATIVE_INFINITY = -std::numeric_limits<T>::infinity();

template <class To, class From>
HD To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The type in which sums over a stored type are returned.
template <class X>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

HD float value_of(float x) { return x; }
HD double value_of(double x) { return x; }
HD float value_of(BF16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

HD float value_of(F16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(bits_as<__half>(x.bits));
#else
  // Normal numbers: move the exponent by 112. Subnormal ones: as the fraction of 0.5, minus 0.5.
  uint32_t word = uint32_t(x.bits) << 16, sign = word & 0x80000000u, doubled = word + word;
  float normal = bits_as<float>((doubled >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  float subnormal = bits_as<float>((doubled >> 17) | (126u << 23)) - 0.5f;
  return bits_as<float>(sign | bits_as<uint32_t>(doubled < (1u << 27) ? subnormal : normal));
#endif
}

// Round to nearest, ties to even; NaN stays NaN.
template <class X>
HD X stored(float x);
template <>
HD float stored<float>(float x) {
  return x;
}
template <>
HD BF16 stored<BF16>(float x) {
#ifdef __CUDA_ARCH__
  return {bits_as<uint16_t>(__float2bfloat16_rn(x))};
#else
  uint32_t word = bits_as<uint32_t>(x);
  uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return {uint16_t(x == x ? rounded : 0x7fc0u)};
#endif
}
template <>
HD F16 stored<F16>(float x) {
#ifdef __CUDA_ARCH__
  return {bits_as<uint16_t>(__float2half_rn(x))};
#else
  // The addition of a power of two 13 bits above the result's last place does the rounding.
  uint32_t word = bits_as<uint32_t>(x), doubled = word + word, sign = word & 0x80000000u;
  float scaled = (bits_as<float>(word & 0x7fffffffu) * 0x1.0p+112f) * 0x1.0p-110f;
  uint32_t bias = doubled & 0xff000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  uint32_t sum = bits_as<uint32_t>(bits_as<float>((bias >> 1) + 0x07800000u) + scaled);
  uint32_t magnitude = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
  return {uint16_t((sign >> 16) | (doubled > 0xff000000u ? 0x7e00u : magnitude))};
#endif
}
