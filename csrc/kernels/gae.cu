// A block owns one sequence and reads it from its end in tiles of 1024 tokens, once. Each thread composes the maps of four
// adjacent tokens, a scan over threads gives the state each begins with. Maps are fp64; the order is fixed.
#include "device.cuh"
#include "gae.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int EACH = 4;

__device__ __forceinline__ GaeMap map_below(const GaeMap& map, int distance) {
  return {__shfl_up_sync(ALL_LANES, map.by_advantage, distance), __shfl_up_sync(ALL_LANES, map.by_value, distance),
          __shfl_up_sync(ALL_LANES, map.constant, distance), __shfl_up_sync(ALL_LANES, map.keep_value, distance),
          __shfl_up_sync(ALL_LANES, map.value, distance)};
}

__global__ void __launch_bounds__(THREADS) gae_kernel(GaeTokens tokens, float* advantages, float* returns) {
  __shared__ GaeMap of_warps[THREADS / WARP];
  const int64_t sequence = blockIdx.x, start = tokens.bounds[sequence];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  GaeState carried = {0.0, tokens.bootstrap ? double(tokens.bootstrap[sequence]) : 0.0};
  for (int64_t end = tokens.bounds[sequence + 1]; end > start; end -= THREADS * EACH) {
    const int64_t last = end - 1 - int64_t(threadIdx.x) * EACH;  // a thread goes down from here
    GaeMap maps[EACH], mine = gae_identity();
    float values[EACH];
    bool trained[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int64_t t = last - i;
      trained[i] = t >= start && tokens.mask[t];
      values[i] = trained[i] ? tokens.values[t] : 0.0f;
      maps[i] = trained[i] ? gae_token(tokens.rewards[t], values[i], tokens.discount, tokens.trace_decay) : gae_identity();
      mine = gae_compose(mine, maps[i]);
    }
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const GaeMap before = map_below(mine, distance);
      if (lane >= distance) mine = gae_compose(before, mine);
    }
    if (lane == WARP - 1) of_warps[warp] = mine;
    GaeMap before = map_below(mine, 1);
    if (lane == 0) before = gae_identity();
    __syncthreads();
    GaeState state = carried;
    for (int i = 0; i < THREADS / WARP; i++) {
      if (i == warp) state = carried;  // the state after all warps below
      carried = gae_apply(of_warps[i], carried);
    }
    state = gae_apply(before, state);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      state = gae_apply(maps[i], state);
      if (last - i < start) continue;
      advantages[last - i] = trained[i] ? float(state.advantage) : 0.0f;
      returns[last - i] = trained[i] ? float(state.advantage + double(values[i])) : 0.0f;
    }
    __syncthreads();  // of_warps is written again
  }
}

}  // namespace

void launch_gae(const GaeTokens& tokens, int64_t sequences, float* advantages, float* returns, cudaStream_t stream) {
  launch(gae_kernel, sequences, THREADS, stream, tokens, advantages, returns);
}
