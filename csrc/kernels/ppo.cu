// ppo_kernel: a block owns one piece of 1024 tokens, or one sequence where something is by sequence; it reads each token
// once (twice by sequence), writes its gradients, and leaves its sums in fp32. add_kernel: one block adds the pieces' sums
// in order, in fp64. No atomics: results repeat bit for bit.
#include "device.cuh"
#include "ppo.cuh"

namespace {

constexpr int THREADS = 256;

// Sum over the block, for every thread; `scratch` has a place for each warp.
__device__ __forceinline__ float sum_over_block(float x, float* scratch) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
  __syncthreads();  // scratch may still be read
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < THREADS / WARP; i++) x += scratch[i];
  return x;
}

__global__ void __launch_bounds__(THREADS) ppo_kernel(PpoTokens<float> tokens, float* partials) {
  __shared__ float scratch[THREADS / WARP];
  const int64_t piece = blockIdx.x;
  const int64_t begin = tokens.bounds ? tokens.bounds[piece] : piece * PPO_PIECE;
  const int64_t end = tokens.bounds ? tokens.bounds[piece + 1] : min(begin + PPO_PIECE, tokens.count);
  float log_ratio = 0.0f, behavior = 0.0f, count = 0.0f, by_ratio = 0.0f;
  if (tokens.bounds) {
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
      if (!tokens.mask[i]) continue;
      const PpoToken<float> token = tokens.token<float>(i);
      log_ratio += token.log_ratio, behavior += finite_or_zero(token.behavior_log_ratio), count += 1.0f;
    }
    count = sum_over_block(count, scratch);
    const float divisor = count > 0.0f ? count : 1.0f;
    log_ratio = sum_over_block(log_ratio, scratch) / divisor;
    behavior = sum_over_block(behavior, scratch) / divisor;
  }
  float sums[PPO_SUMS] = {};
  const bool shared = tokens.options.sequence_ratio != 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    const bool trained = tokens.mask[i];
    float gradient = 0.0f;
    if (trained) {
      const PpoSlopes<float> slopes = ppo_token(tokens.options, tokens.token<float>(i), log_ratio, behavior, sums);
      by_ratio += slopes.by_ratio;
      gradient = shared ? slopes.direct : slopes.by_ratio + slopes.direct;
      if (!shared) sums[SUM_SQUARED_GRADIENT] += gradient * gradient;
    }
    tokens.grad_logprobs[i] = gradient;
    tokens.grad_entropy[i] = trained ? float(-tokens.options.entropy_coefficient * tokens.options.scale) : 0.0f;
  }
  if (shared) {  // the sequence's ratio has every trained token's slope, and each token an equal part in it
    const float part = sum_over_block(by_ratio, scratch) / count;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {  // the places this thread wrote
      if (!tokens.mask[i]) continue;
      const float gradient = tokens.grad_logprobs[i] + part;
      tokens.grad_logprobs[i] = gradient;
      sums[SUM_SQUARED_GRADIENT] += gradient * gradient;
    }
  }
#pragma unroll
  for (int k = 0; k < PPO_SUMS; k++) {
    const float sum = sum_over_block(sums[k], scratch);
    if (threadIdx.x == 0) partials[piece * PPO_SUMS + k] = sum;
  }
}

__global__ void __launch_bounds__(WARP) add_kernel(const float* partials, int64_t pieces, float* loss, double* sums) {
  const int k = threadIdx.x;
  if (k >= PPO_SUMS) return;
  double total = 0.0;
  for (int64_t piece = 0; piece < pieces; piece++) total += double(partials[piece * PPO_SUMS + k]);
  sums[k] = total;
  if (k == SUM_LOSS) *loss = float(total);
}
static_assert(PPO_SUMS <= WARP);

}  // namespace

void launch_ppo(
    const PpoTokens<float>& tokens, int64_t pieces, float* partials, float* loss, double* sums, cudaStream_t stream) {
  launch(ppo_kernel, pieces, THREADS, stream, tokens, partials);
  launch(add_kernel, 1, WARP, stream, partials, pieces, loss, sums);
}
