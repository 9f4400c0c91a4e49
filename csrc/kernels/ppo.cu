// One launch. A block owns a piece of at most 256 tokens and a thread one token, whose numbers it reads all at once,
// writes its gradients, and leaves its sums in fp32. Where something is by sequence a piece is of one sequence, and there
// are two sweeps (sweeps.cuh): the first leaves what each piece adds to its sequence's means. The block that finishes
// last adds the pieces' sums in fp64. All orders depend on places alone: results repeat bit for bit.
#include "ppo.cuh"
#include "sweeps.cuh"

namespace {

constexpr int THREADS = PPO_PIECE, WARPS = THREADS / WARP;

// Sums over the 2 * MASK lanes that are neighbours, of all x at once: lanes with MASK keep the second half of x and give
// the first away. 31 shuffles sum 20 numbers over a warp, and lane k is left with number k.
template <int MASK, int N>
__device__ __forceinline__ float sums_by_lane(const float (&x)[N]) {
  constexpr int HALF = N > 16 ? 16 : (N + 1) / 2;
  if constexpr (MASK == 0) return x[0];
  else {
    const bool second = threadIdx.x & MASK;
    float kept[HALF];
#pragma unroll
    for (int k = 0; k < HALF; k++) {
      const float other = N == 1 ? x[0] : HALF + k < N ? x[HALF + k] : 0.0f;
      kept[k] = (second ? other : x[k]) + __shfl_xor_sync(ALL_LANES, second ? x[k] : other, MASK);
    }
    return sums_by_lane<MASK / 2>(kept);
  }
}

// Leaves the sums over each warp, with a barrier.
template <int N>
using OfWarps = float[WARPS][N];

template <int N>
__device__ __forceinline__ void sum_over_warps(const float (&x)[N], OfWarps<N>& of_warps) {
  static_assert(N > 16 || (N & (N - 1)) == 0);
  constexpr int LANES = N > 16 ? 1 : WARP / N;  // that are left with one sum
  const float sum = sums_by_lane<WARP / 2>(x);
  const int lane = threadIdx.x % WARP;
  if (lane % LANES == 0 && lane / LANES < N) of_warps[threadIdx.x / WARP][lane / LANES] = sum;
  __syncthreads();
}

template <int N>
__device__ __forceinline__ float sum_of(const OfWarps<N>& of_warps, int k) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += of_warps[i][k];
  return sum;
}

// Lane k of warp w adds statistic k of every eighth piece, 128 pieces at a time; then the warps' parts are added.
__device__ __forceinline__ void add_pieces(const float* of_pieces, int64_t pieces, float* loss, double* sums) {
  constexpr int EACH = 16;
  __shared__ double parts[WARPS][WARP];
  const int k = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  double part = 0.0;
#pragma unroll 1
  for (int64_t first = warp; k < PPO_SUMS && first < pieces; first += EACH * WARPS) {
    float found[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (first + i * WARPS < pieces) found[i] = __ldcg(&of_pieces[(first + i * WARPS) * PPO_SUMS + k]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) part += double(found[i]);
  }
  parts[warp][k] = part;
  __syncthreads();
  if (warp > 0 || k >= PPO_SUMS) return;
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += parts[i][k];
  sums[k] = total;
  if (k == SUM_LOSS) *loss = float(total);
}
static_assert(PPO_SUMS <= WARP);

// Tokens [begin, end), of which there may be none. By sequence: of the sequence whose pieces are [first, first + count).
struct Place {
  int64_t begin, end, first, count;
};

// A sequence's pieces are numbered from bounds / 256 + its own number on: enough, wherever it begins and ends.
__device__ __forceinline__ Place place_of(const PpoTokens<float>& tokens, int64_t sequences, int64_t piece) {
  const int64_t s = last_within(tokens.bounds, sequences, [=](int64_t i) { return (piece - i + 1) * PPO_PIECE - 1; });
  const int64_t begin = tokens.bounds[s], end = tokens.bounds[s + 1];
  const int64_t first = begin / PPO_PIECE + s, from = begin + (piece - first) * PPO_PIECE;
  return {from, min(from + PPO_PIECE, end), first, ppo_pieces(end - begin)};
}

enum { LOG_RATIO, BEHAVIOR, TOKENS, KNOWN, MEANS };

template <bool BY_SEQUENCE>
__global__ void __launch_bounds__(THREADS) ppo_kernel(
    PpoTokens<float> tokens, int64_t sequences, int64_t pieces, float* of_pieces, unsigned slot, float* loss,
    double* all_sums) {
  __shared__ OfWarps<MEANS> of_means;
  __shared__ OfWarps<PPO_SUMS> of_warps;
  __shared__ bool is_last;
  const Turn turn = BY_SEQUENCE ? draw_turn(slot, pieces) : Turn{true, blockIdx.x};
  Place place = {turn.piece * PPO_PIECE, min((turn.piece + 1) * PPO_PIECE, tokens.count), 0, 0};
  if (BY_SEQUENCE) place = place_of(tokens, sequences, turn.piece);
  const bool has_others = place.count > 1;  // pieces of its sequence; if not, nobody waits
  if (BY_SEQUENCE && !turn.is_second && !has_others) {  // it may be the last of all: the second sweep did not wait for it
    if (threadIdx.x == 0) is_last = count_finished(slot, gridDim.x, true);
    __syncthreads();
    if (is_last) add_pieces(of_pieces, pieces, loss, all_sums);
    return;
  }
  const int64_t i = place.begin + threadIdx.x;
  PpoToken<float> token = {};
  bool trained = false;
  if (i < place.end) trained = tokens.mask[i], token = tokens.token<float>(i);  // no load waits for the mask
  float means[MEANS] = {};
  if (BY_SEQUENCE) {
    float4* of_sequences = reinterpret_cast<float4*>(of_pieces + pieces * PPO_SUMS);
    if (turn.is_second && has_others) {
      if (threadIdx.x == 0) wait_for_first_sweep(slot, pieces);
      __syncthreads();
#pragma unroll 1
      for (int64_t j = threadIdx.x; j < place.count; j += THREADS) {
        const float4 part = __ldcg(&of_sequences[place.first + j]);
        means[LOG_RATIO] += part.x, means[BEHAVIOR] += part.y, means[TOKENS] += part.z, means[KNOWN] += part.w;
      }
    } else if (trained) {
      means[LOG_RATIO] = token.log_ratio, means[TOKENS] = 1.0f;
      add_behavior(token.behavior_log_ratio, means[BEHAVIOR], means[KNOWN]);
    }
    sum_over_warps(means, of_means);
    for (int k = 0; k < MEANS; k++) means[k] = sum_of(of_means, k);
    if (!turn.is_second) {
      if (threadIdx.x > 0) return;
      of_sequences[turn.piece] = {means[LOG_RATIO], means[BEHAVIOR], means[TOKENS], means[KNOWN]};
      count_finished(slot, gridDim.x, true);  // never the last: its sequence's second sweep waits for it
      return;
    }
    means[LOG_RATIO] /= fmaxf(means[TOKENS], 1.0f), means[BEHAVIOR] /= fmaxf(means[KNOWN], 1.0f);
  }
  float sums[PPO_SUMS] = {};
  if (i < place.end) {
    tokens.grad_entropy[i] = trained ? tokens.entropy_slope(token.row_weight) : 0.0f;
    tokens.grad_logprobs[i] =
        trained ? ppo_token<float>(tokens.options, token, means[LOG_RATIO], means[BEHAVIOR], sums) : 0.0f;
  }
  sum_over_warps(sums, of_warps);
  if (threadIdx.x < WARP) {
    if (threadIdx.x < PPO_SUMS) of_pieces[turn.piece * PPO_SUMS + threadIdx.x] = sum_of(of_warps, threadIdx.x);
    __syncwarp();
    if (threadIdx.x == 0) is_last = count_finished(slot, gridDim.x, false);
  }
  __syncthreads();
  if (is_last) add_pieces(of_pieces, pieces, loss, all_sums);
}

}  // namespace

void launch_ppo(
    const PpoTokens<float>& tokens, int64_t sequences, float* scratch, float* loss, double* sums, cudaStream_t stream) {
  const unsigned slot = slot_of(stream, "ppo_loss");
  const int64_t pieces = ppo_device_pieces(tokens.count, sequences);
  auto run = [&](auto kernel, int64_t blocks) {
    launch(kernel, blocks, THREADS, stream, tokens, sequences, pieces, scratch, slot, loss, sums);
  };
  if (sequences > 0) run(ppo_kernel<true>, 2 * pieces);
  else run(ppo_kernel<false>, pieces);
}
