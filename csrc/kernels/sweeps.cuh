// Two sweeps over pieces in one launch: a block of the second may need what the first found of any piece. Blocks draw
// tickets as they start, and the first sweep has the lower ones: whoever waits, waits for blocks that run already or are
// done. So there is no deadlock, however many blocks are resident. Nothing depends on which block draws which ticket.
#pragma once

#include <map>
#include <mutex>

#include "device.cuh"

namespace {

// Of one launch; 0 before and after it. Launches that may run at the same time have their own.
struct Counters {
  unsigned started;
  unsigned long long finished;  // 1 for each block, and OF_FIRST for each of the first sweep
};
constexpr unsigned long long OF_FIRST = 1ull << 32;
constexpr unsigned SLOTS = 4096;
__device__ Counters counters[SLOTS];

// Launches of one stream run one after another and share a slot. One that is captured may be replayed beside them: it
// has its own for ever.
unsigned slot_of(cudaStream_t stream, const char* name) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, unsigned> of_streams;
  static unsigned used = 0;
  int device = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(device, stream);
  const auto found = of_streams.find(key);
  if (capture == cudaStreamCaptureStatusNone && found != of_streams.end()) return found->second;
  if (used == SLOTS) {
    throw std::runtime_error(
        std::string(name) + ": was called on, or captured in CUDA graphs from, more than " + std::to_string(SLOTS) +
        " streams in this process; replay a graph instead of capturing it anew");
  }
  if (capture == cudaStreamCaptureStatusNone) of_streams[key] = used;
  return used++;
}

// What a block is to do.
struct Turn {
  bool is_second;
  int64_t piece;
};

// For every thread of the block, with a barrier. The launch has 2 * pieces blocks.
__device__ __forceinline__ Turn draw_turn(unsigned slot, int64_t pieces) {
  __shared__ unsigned drawn;
  if (threadIdx.x == 0) drawn = atomicAdd(&counters[slot].started, 1u);
  __syncthreads();
  const bool is_second = drawn >= pieces;
  return {is_second, is_second ? drawn - pieces : drawn};
}

// By one thread, after what others of the block have written (a barrier lies between): whoever sees the block counted
// sees that. True for the last of the launch's blocks; a barrier after it lets the block read what all have written.
__device__ __forceinline__ bool count_finished(unsigned slot, int64_t blocks, bool is_first) {
  const unsigned long long one = is_first ? OF_FIRST + 1 : 1;
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before) : "l"(&counters[slot].finished), "l"(one) : "memory");
  if (before % OF_FIRST < blocks - 1) return false;
  counters[slot] = {0, 0};
  return true;
}

// By one thread of the second sweep; a barrier after it lets the block read what the first has written. Blocks of the
// second sweep that need not wait may end before one of the first does: they are not counted here.
__device__ __forceinline__ void wait_for_first_sweep(unsigned slot, int64_t pieces) {
  unsigned long long finished;
  do {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(finished) : "l"(&counters[slot].finished) : "memory");
  } while (finished / OF_FIRST < pieces);
}

// The last i below `count` with bounds[i] <= limit(i), where that holds for all before it and for the first. Called by a
// whole warp, which compares 64 bounds at a time: a search among 4,096 waits for memory twice.
template <class Limit>
__device__ __forceinline__ int64_t last_within(const int64_t* bounds, int64_t count, Limit limit) {
  constexpr int EACH = 2;
  const int lane = threadIdx.x % WARP;
  int64_t low = 0;
  while (count > 1) {  // it is in [low, low + count)
    const int64_t step = (count + EACH * WARP - 1) / (EACH * WARP);
    int64_t found[EACH];
    int within = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) found[k] = bounds[low + min((k * WARP + lane) * step, count - 1)];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const int64_t i = (k * WARP + lane) * step;
      within += __popc(__ballot_sync(ALL_LANES, i < count && found[k] <= limit(low + i)));
    }
    low += (within - 1) * step;
    count = min(step, count - (within - 1) * step);
  }
  return low;
}

}  // namespace
