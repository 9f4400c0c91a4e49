// CUDA's words for the host, so that the kernels' own source runs in tests without a device. Blocks run one after another;
// a block's threads are fibers that switch at barriers and shuffles. A barrier that some threads never reach is an error,
// as it would hang or be undefined on a device. It shows wrong indices and wrong synchronisation, not missing fences.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "none"; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::min;

namespace emulation {

enum Waiting { NOTHING, WARP, BLOCK, DONE };
constexpr size_t STACK_BYTES = 64 << 10;
constexpr unsigned WARP_THREADS = 32;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  Waiting waiting = NOTHING;
  uint64_t slot = 0;
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::function<void()> body;

inline void wait(Waiting what) {
  unsigned me = threadIdx.x;
  fibers[me].waiting = what;
  swapcontext(&fibers[me].context, &scheduler);
  threadIdx.x = me;
}

inline void entry() {
  body();
  fibers[threadIdx.x].waiting = DONE;
}

// Let a group of threads go on if every one of them that still runs waits for `what`.
inline bool release(unsigned first, unsigned last, Waiting what) {
  bool any = false;
  for (unsigned i = first; i < last; i++) {
    if (fibers[i].waiting != what && fibers[i].waiting != DONE) return false;
    any |= fibers[i].waiting == what;
  }
  for (unsigned i = first; i < last && any; i++) {
    if (fibers[i].waiting == what) fibers[i].waiting = NOTHING;
  }
  return any;
}

inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = &scheduler;
    fiber.waiting = NOTHING;
    makecontext(&fiber.context, entry, 0);
  }
  while (true) {
    bool ran = false;
    for (unsigned i = 0; i < threads; i++) {
      if (fibers[i].waiting != NOTHING) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      ran = true;
    }
    bool released = false;
    for (unsigned i = 0; i < threads; i += WARP_THREADS) released |= release(i, i + WARP_THREADS, WARP);
    if (!released) released = release(0, threads, BLOCK);
    if (released) continue;
    if (!ran) throw std::runtime_error("emulation: threads of a block wait at different barriers");
    bool all_done = true;
    for (unsigned i = 0; i < threads; i++) all_done &= fibers[i].waiting == DONE;
    if (all_done) return;
  }
}

template <class T>
T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  unsigned me = threadIdx.x;
  memcpy(&fibers[me].slot, &value, sizeof(T));
  wait(WARP);
  memcpy(&value, &fibers[me / WARP_THREADS * WARP_THREADS + from].slot, sizeof(T));
  wait(WARP);
  return value;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::BLOCK); }
inline void __syncwarp() { emulation::wait(emulation::WARP); }
inline void __threadfence() {}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  unsigned lane = threadIdx.x % 32;
  return emulation::exchange(value, lane + delta < 32 ? lane + delta : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  unsigned lane = threadIdx.x % 32;
  return emulation::exchange(value, lane >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::exchange(value, lane);
}
template <class T>
T atomicAdd(T* to, T value) {
  T before = *to;
  *to += value;
  return before;
}

template <class Kernel, class... Arguments>
void emulate(Kernel kernel, unsigned blocks, unsigned threads, Arguments... arguments) {
  assert(threads % emulation::WARP_THREADS == 0);
  gridDim.x = blocks, blockDim.x = threads;
  emulation::body = [=] { kernel(arguments...); };
  for (unsigned block = 0; block < blocks; block++) {
    blockIdx.x = block;
    emulation::run_block(threads);
  }
}
