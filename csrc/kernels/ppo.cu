// One launch. A block owns one piece of 256 tokens, or one sequence where something is by sequence; it reads each token
// once (twice by sequence), writes its gradients, and leaves its sums in fp32. The block that finishes last adds the
// pieces' sums in fp64, in an order that does not depend on which it is: results repeat bit for bit.
#include "device.cuh"
#include "ppo.cuh"

#include <map>
#include <mutex>

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP;

// How many blocks of a launch have finished; 0 before and after it. Launches that may run at the same time have their own.
constexpr unsigned TICKETS = 4096;
__device__ unsigned tickets[TICKETS];

// Launches of one stream run one after another and share a ticket. One that is captured may be replayed beside them: it
// has its own for ever.
unsigned ticket_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaStream_t>, unsigned> of_streams;
  static unsigned used = 0;
  int device = 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) throw std::runtime_error(std::string("ppo_loss: ") + cudaGetErrorString(error));
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(device, stream);
  const auto found = of_streams.find(key);
  if (capture == cudaStreamCaptureStatusNone && found != of_streams.end()) return found->second;
  if (used == TICKETS) {
    throw std::runtime_error(
        "ppo_loss: was called on, or captured in CUDA graphs from, more than 4096 streams in this process; replay a "
        "graph instead of capturing it anew");
  }
  if (capture == cudaStreamCaptureStatusNone) of_streams[key] = used;
  return used++;
}

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
  return x;
}

// Sum over the block, for every thread; `scratch` has a place for each warp.
__device__ __forceinline__ float sum_over_block(float x, float* scratch) {
  x = sum_over_warp(x);
  __syncthreads();  // scratch may still be read
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) x += scratch[i];
  return x;
}

// Lane k of warp w adds statistic k of every eighth piece, then the warps' parts are added in their order.
__device__ void add_pieces(const volatile float* partials, int64_t pieces, float* loss, double* sums) {
  __shared__ double parts[WARPS][WARP];
  const int k = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  double part = 0.0;
  if (k < PPO_SUMS) {
    for (int64_t piece = warp; piece < pieces; piece += WARPS) part += double(partials[piece * PPO_SUMS + k]);
  }
  parts[warp][k] = part;
  __syncthreads();
  if (warp > 0 || k >= PPO_SUMS) return;
  double total = 0.0;
  for (int i = 0; i < WARPS; i++) total += parts[i][k];
  sums[k] = total;
  if (k == SUM_LOSS) *loss = float(total);
}
static_assert(PPO_SUMS <= WARP);

__global__ void __launch_bounds__(THREADS) ppo_kernel(
    PpoTokens<float> tokens, int64_t pieces, float* partials, unsigned ticket, float* loss, double* all_sums) {
  __shared__ float scratch[WARPS];
  __shared__ bool is_last;
  const int64_t piece = blockIdx.x;
  int64_t begin = 0, end = 0;  // no piece, one block: the sums are zeros
  if (piece < pieces) {
    begin = tokens.bounds ? tokens.bounds[piece] : piece * PPO_PIECE;
    end = tokens.bounds ? tokens.bounds[piece + 1] : min(begin + PPO_PIECE, tokens.count);
  }
  float log_ratio = 0.0f, behavior = 0.0f, count = 0.0f;
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
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    const bool trained = tokens.mask[i];
    tokens.grad_entropy[i] = trained ? tokens.entropy_slope<float>(i) : 0.0f;
    tokens.grad_logprobs[i] =
        trained ? ppo_token<float>(tokens.options, tokens.token<float>(i), log_ratio, behavior, sums) : 0.0f;
  }
  __shared__ float of_warps[WARPS][PPO_SUMS];
#pragma unroll
  for (int k = 0; k < PPO_SUMS; k++) {
    const float sum = sum_over_warp(sums[k]);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP][k] = sum;
  }
  __syncthreads();
  if (threadIdx.x < WARP) {
    if (threadIdx.x < PPO_SUMS && piece < pieces) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += of_warps[i][threadIdx.x];
      partials[piece * PPO_SUMS + threadIdx.x] = sum;
      __threadfence();  // the sums are there before the ticket says so
    }
    __syncwarp();
    if (threadIdx.x == 0) is_last = atomicAdd(&tickets[ticket], 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  add_pieces(partials, pieces, loss, all_sums);
  if (threadIdx.x == 0) tickets[ticket] = 0;
}

}  // namespace

void launch_ppo(
    const PpoTokens<float>& tokens, int64_t pieces, float* partials, float* loss, double* sums, cudaStream_t stream) {
  const int64_t blocks = pieces > 0 ? pieces : 1;
  launch(ppo_kernel, blocks, THREADS, stream, tokens, pieces, partials, ticket_of(stream), loss, sums);
}
