// What the kernels share: launching, 16-byte pieces of a row, exp2.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../math/numbers.h"

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

// One-dimensional launch on the stream; a launch that the driver refuses is an error here and not at some later call.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) return;
  if (blocks > 0x7fffffffll) throw std::runtime_error("a launch of " + std::to_string(blocks) + " blocks: 2^31 - 1 are allowed");
#ifdef EMULATED
  (void)stream;
  emulate(kernel, unsigned(blocks), unsigned(threads), Parameters(arguments)...);
#else
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string("kernel launch: ") + cudaGetErrorString(error));
#endif
}

// 2^x to 2 ulp, 0 for results below 2^-126.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef EMULATED
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 16 bytes of a row, as they are loaded and stored.
template <class X>
struct Piece {
  static constexpr int WIDTH = 16 / sizeof(X);
  uint4 raw;

  __device__ __forceinline__ X element(int i) const {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};  // i is a constant after unrolling: no local memory
    if constexpr (sizeof(X) == 4) return bits_as<X>(words[i]);
    else return {uint16_t(words[i / 2] >> (i % 2 * 16))};
  }

  __device__ __forceinline__ static Piece of(const X (&x)[WIDTH]) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      if constexpr (sizeof(X) == 4) words[i] = bits_as<uint32_t>(x[i]);
      else words[i / 2] |= uint32_t(x[i].bits) << (i % 2 * 16);
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }

  // Elements at and after `count` become `fill`. ALIGNED says that `from` is a multiple of 16 bytes.
  template <bool ALIGNED>
  __device__ __forceinline__ static Piece load(const X* from, int count, X fill) {
    if (ALIGNED && count >= WIDTH) return {*reinterpret_cast<const uint4*>(from)};
    X x[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) x[i] = i < count ? from[i] : fill;
    return of(x);
  }

  template <bool ALIGNED>
  __device__ __forceinline__ void store(X* to, int count) const {
    if (ALIGNED && count >= WIDTH) {
      *reinterpret_cast<uint4*>(to) = raw;
      return;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      if (i < count) to[i] = element(i);
    }
  }
};
