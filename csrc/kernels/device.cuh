// What the kernels share: launching, 16-byte pieces of a row, exp2.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "../math/numbers.h"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// Launch on the stream; a launch that the driver refuses is an error here and not at some later call.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, cudaStream_t stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  kernel<<<grid, threads, 0, stream>>>(arguments...);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("kernel launch: ") + cudaGetErrorString(error));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  if (blocks > 0x7fffffffll) throw std::runtime_error("a launch of " + std::to_string(blocks) + " blocks: 2^31 - 1 are allowed");
  launch(kernel, dim3(unsigned(blocks)), threads, stream, arguments...);
}

// What loads x stays before this place, what computes with it behind: so loads wait together, and none in a branch.
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)); }

// 2^x to 2 ulp, 0 for results below 2^-126.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Two 16-bit numbers in a word, the first in its low half.
template <class X>
__device__ __forceinline__ uint32_t stored_pair(float low, float high) {
  if constexpr (std::is_same_v<X, BF16>) return bits_as<uint32_t>(__floats2bfloat162_rn(low, high));
  else return bits_as<uint32_t>(__floats2half2_rn(low, high));
}

template <class X>
__device__ __forceinline__ float2 values_of_pair(uint32_t pair) {
  return make_float2(value_of(X{uint16_t(pair)}), value_of(X{uint16_t(pair >> 16)}));
}

// The larger, or smaller, of each half. A NaN gives way to a number, as in fmaxf.
template <class X, bool LARGER>
__device__ __forceinline__ uint32_t extreme_pair(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<X, BF16>, __nv_bfloat162, __half2>;
  const Pair x = bits_as<Pair>(a), y = bits_as<Pair>(b);
  return bits_as<uint32_t>(LARGER ? __hmax2(x, y) : __hmin2(x, y));
}

// Adjacent elements of a row in registers: 16 bytes as they are loaded, as many elements where they are stored.
template <class X, int N = 16 / sizeof(X)>
struct Piece {
  static constexpr int WIDTH = N, WORDS = N * sizeof(X) / 4;
  using Vector = std::conditional_t<WORDS == 4, uint4, uint2>;
  static_assert(sizeof(Vector) == N * sizeof(X));
  uint32_t words[WORDS];  // indices are constants after unrolling: no local memory

  __device__ __forceinline__ X element(int i) const {
    if constexpr (sizeof(X) == 4) return bits_as<X>(words[i]);
    else return {uint16_t(words[i / 2] >> (i % 2 * 16))};
  }

  __device__ __forceinline__ static Piece filled(X fill) {
    X x[N];
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = fill;
    return of(x);
  }

  __device__ __forceinline__ static Piece of(const X (&x)[N]) {
    Piece piece = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
      if constexpr (sizeof(X) == 4) piece.words[i] = bits_as<uint32_t>(x[i]);
      else piece.words[i / 2] |= uint32_t(x[i].bits) << (i % 2 * 16);
    }
    return piece;
  }

  // To nearest, two at a time: one instruction for both.
  __device__ __forceinline__ static Piece rounded(const float (&x)[N]) {
    Piece piece;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      if constexpr (sizeof(X) == 4) piece.words[i] = bits_as<uint32_t>(x[i]);
      else piece.words[i] = stored_pair<X>(x[2 * i], x[2 * i + 1]);
    }
    return piece;
  }

  // Of the 16 bytes at `from`, a multiple of 16: elements outside of [begin, end) are not read and become `fill`.
  __device__ __forceinline__ static Piece load(const X* from, int begin, int end, X fill) {
    if (begin <= 0 && end >= N) return bits_as<Piece>(*reinterpret_cast<const Vector*>(from));
    X x[N];
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = fill;
    if (begin >= N || end <= 0) return of(x);
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (i >= begin && i < end) x[i] = from[i];
    }
    return of(x);
  }

  // Elements of [begin, end); whole at once where `to` is a multiple of the piece's bytes.
  __device__ __forceinline__ void store(X* to, int begin, int end, bool aligned = true) const {
    if (aligned && begin <= 0 && end >= N) {
      *reinterpret_cast<Vector*>(to) = bits_as<Vector>(*this);
      return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (i >= begin && i < end) to[i] = element(i);
    }
  }
};
