// Two sweeps (sweeps.cuh) over tiles of 1024 tokens, whichever sequences those belong to. A thread composes the maps of
// four adjacent tokens, from the last down; scans over lanes and warps give the state that each begins with. The first
// sweep leaves the map of each tile, the second composes those of the tiles above its own, up to where a sequence ends.
// Maps are fp64 and composed in an order that depends on places alone: results repeat bit for bit.
#include "gae.cuh"
#include "sweeps.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int EACH = GAE_TILE / THREADS;

template <class Shuffle>
__device__ __forceinline__ GaeMap map_of_lane(const GaeMap& map, Shuffle shuffle) {
  return {shuffle(map.factor), shuffle(map.constant)};
}

__device__ __forceinline__ GaeMap map_below(const GaeMap& map, int distance) {
  return map_of_lane(map, [=](double x) { return __shfl_up_sync(ALL_LANES, x, distance); });
}

// What the tiles above this one leave, for lane 0 of the warp that calls it.
__device__ __forceinline__ double left_above(const GaeMap* of_tiles, int64_t tile, int64_t tiles) {
  const int lane = threadIdx.x % WARP;
  GaeMap all = gae_identity();
  for (int64_t first = tile + 1; first < tiles; first += WARP) {
    GaeMap map = gae_identity();
    if (first + lane < tiles) map = {__ldcg(&of_tiles[first + lane].factor), __ldcg(&of_tiles[first + lane].constant)};
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
      const GaeMap above = map_of_lane(map, [=](double x) { return __shfl_down_sync(ALL_LANES, x, distance); });
      if (lane + distance < WARP) map = gae_compose(above, map);
    }
    all = gae_compose(map, all);
    if (__shfl_sync(ALL_LANES, all.factor, 0) == 0.0) break;  // a sequence ends there
  }
  return all.constant;
}

__global__ void __launch_bounds__(THREADS, 2) gae_kernel(
    GaeTokens tokens, int64_t tiles, GaeMap* of_tiles, unsigned slot, float* advantages, float* returns) {
  __shared__ bool is_end[GAE_TILE];
  __shared__ float bootstraps[GAE_TILE];  // where a sequence ends
  __shared__ GaeMap of_warps[WARPS];
  __shared__ double carried;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int last = GAE_TILE - 1 - int(threadIdx.x) * EACH;  // a thread goes down from here
#pragma unroll
  for (int i = 0; i < EACH; i++) is_end[last - i] = false;
  const Turn turn = draw_turn(slot, tiles);
  const int64_t begin = turn.piece * GAE_TILE;
  const int size = int(min(int64_t(GAE_TILE), tokens.count - begin));
  int64_t s = last_within(tokens.bounds, tokens.sequences, [=](int64_t) { return begin; });
  float rewards[EACH] = {}, values[EACH] = {};
  bool trained[EACH] = {};
#pragma unroll
  for (int i = 0; i < EACH; i++) {  // whether trained or not: no load waits for the mask
    if (last - i >= size) continue;
    const int64_t t = begin + last - i;
    trained[i] = tokens.mask[t], rewards[i] = tokens.rewards[t], values[i] = tokens.values[t];
  }
  for (s += threadIdx.x; s < tokens.sequences; s += THREADS) {
    const int64_t from = tokens.bounds[s] - begin, end = tokens.bounds[s + 1] - begin;
    float bootstrap = tokens.bootstrap ? tokens.bootstrap[s] : 0.0f;
    pin(bootstrap);
    if ((end <= size) & (end > from)) is_end[end - 1] = true, bootstraps[end - 1] = bootstrap;
    if (from >= size) break;
  }
  __syncthreads();

  GaeMap mine = gae_identity();
  bool ends[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    pin(rewards[i]), pin(values[i]);
    ends[i] = is_end[last - i];
    if (ends[i]) mine = gae_end(bootstraps[last - i]);
    if (trained[i]) mine = gae_compose(mine, gae_token(rewards[i], values[i], tokens.discount, tokens.trace_decay));
  }
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const GaeMap before = map_below(mine, distance);
    if (lane >= distance) mine = gae_compose(before, mine);
  }
  if (lane == WARP - 1) of_warps[warp] = mine;
  const GaeMap before = map_below(mine, 1);
  if (turn.is_second && warp == 0) {
    double above = 0.0;
    if (!is_end[size - 1]) {
      if (lane == 0) wait_for_first_sweep(slot, tiles);
      __syncwarp();
      above = left_above(of_tiles, turn.piece, tiles);
    }
    if (lane == 0) carried = above;
  }
  __syncthreads();
  if (!turn.is_second) {
    if (threadIdx.x > 0) return;
    GaeMap all = of_warps[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++) all = gae_compose(all, of_warps[i]);
    of_tiles[turn.piece] = all;
    count_finished(slot, 2 * tiles, true);
    return;
  }
  double after = carried;
#pragma unroll
  for (int i = 0; i < WARPS; i++) {
    const double further = gae_apply(of_warps[i], after);
    after = i < warp ? further : after;
  }
  if (lane > 0) after = gae_apply(before, after);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (last - i >= size) continue;
    if (ends[i]) after = bootstraps[last - i];
    const double advantage = gae_advantage(rewards[i], values[i], tokens.discount, after);
    if (trained[i]) after = gae_apply(gae_token(rewards[i], values[i], tokens.discount, tokens.trace_decay), after);
    advantages[begin + last - i] = trained[i] ? float(advantage) : 0.0f;
    returns[begin + last - i] = trained[i] ? float(advantage + double(values[i])) : 0.0f;
  }
  if (threadIdx.x == 0) count_finished(slot, 2 * tiles, false);
}

}  // namespace

void launch_gae(const GaeTokens& tokens, GaeMap* of_tiles, float* advantages, float* returns, cudaStream_t stream) {
  const int64_t tiles = gae_tiles(tokens.count);
  if (tiles == 0) return;
  launch(
      gae_kernel, 2 * tiles, THREADS, stream, tokens, tiles, of_tiles, slot_of(stream, "packed_gae"), advantages, returns);
}
