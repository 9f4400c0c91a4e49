// partials: a block owns one tile (32 KB) of one row, reads it once into registers and leaves four floats.
// finish: a thread owns one row and merges its tiles in order. gradient: a block owns one tile, reads and writes it once.
// All arithmetic is fp32. No atomics, and the tiles do not depend on the number of rows: results repeat bit for bit.
#include "device.cuh"
#include "logprobs.cuh"

#include <cassert>

namespace {

constexpr int THREADS = 256;
constexpr int PIECES = 8;  // 16-byte loads of a thread, all in flight before the first is used
static_assert(THREADS * PIECES * 16 == TILE_BYTES);

// Where a thread's pieces lie in its tile: piece i of thread t begins at column (i * THREADS + t) * WIDTH.
template <class X>
__device__ __forceinline__ int column_of(int piece) {
  return (piece * THREADS + int(threadIdx.x)) * Piece<X>::WIDTH;
}

template <class X>
__device__ __forceinline__ X lowest() {
  if constexpr (sizeof(X) == 4) return NEGATIVE_INFINITY<float>;
  else return {uint16_t(std::is_same_v<X, BF16> ? 0xff80 : 0xfc00)};
}

__device__ __forceinline__ float inverse_temperature(const LogitRows& rows, int64_t row) {
  return 1.0f / (rows.temperatures ? rows.temperatures[row] : rows.temperature);
}

// Sums in powers of two: moment is in units of log2 until the block is done.
struct Sums {
  float peak, sum, moment;
};

__device__ __forceinline__ Sums merge_sums(const Sums& a, const Sums& b, float scale) {
  float peak = fmaxf(a.peak, b.peak);
  if (peak == NEGATIVE_INFINITY<float>) return {peak, a.sum + b.sum, a.moment + b.moment};
  float shift_a = fmaxf((a.peak - peak) * scale, -1000.0f), shift_b = fmaxf((b.peak - peak) * scale, -1000.0f);
  float factor_a = fast_exp2(shift_a), factor_b = fast_exp2(shift_b);
  // A side without a finite column carries zeros, or the NaN that must not be lost.
  float sum_a = a.peak == NEGATIVE_INFINITY<float> ? a.sum : factor_a * a.sum;
  float sum_b = b.peak == NEGATIVE_INFINITY<float> ? b.sum : factor_b * b.sum;
  return {peak, sum_a + sum_b, factor_a * (a.moment + shift_a * a.sum) + factor_b * (b.moment + shift_b * b.sum)};
}

__device__ __forceinline__ Sums merge_over_warp(Sums mine, float scale) {
#pragma unroll
  for (int mask = 1; mask < WARP; mask *= 2) {
    Sums other = {
        __shfl_xor_sync(ALL_LANES, mine.peak, mask), __shfl_xor_sync(ALL_LANES, mine.sum, mask),
        __shfl_xor_sync(ALL_LANES, mine.moment, mask)};
    mine = merge_sums(mine, other, scale);
  }
  return mine;
}

template <class X, bool ALIGNED>
__global__ void __launch_bounds__(THREADS) partials_kernel(const X* logits, LogitRows rows, int tiles, Partial<float>* out) {
  constexpr int WIDTH = Piece<X>::WIDTH;
  __shared__ Sums of_warps[THREADS / WARP];
  const int64_t row = blockIdx.x / unsigned(tiles);
  const int tile = blockIdx.x % unsigned(tiles), first = tile * (THREADS * PIECES * WIDTH);
  const int64_t label = rows.labels[row];
  if (label < 0) {  // the logits are not read
    if (threadIdx.x == 0) out[tile * rows.rows + row] = nothing<float>();
    return;
  }
  const X* x = logits + row * rows.stride + first;
  const int count = rows.columns - first;

  Piece<X> pieces[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    pieces[i] = Piece<X>::template load<ALIGNED>(x + column_of<X>(i), count - column_of<X>(i), lowest<X>());
  }
  Sums mine = {NEGATIVE_INFINITY<float>, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) mine.peak = fmaxf(mine.peak, value_of(pieces[i].element(j)));
  }
  const float scale = inverse_temperature(rows, row) * LOG2_E;
  const float peak = mine.peak == NEGATIVE_INFINITY<float> ? 0.0f : mine.peak;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      float d = (value_of(pieces[i].element(j)) - peak) * scale, e = fast_exp2(d);
      mine.sum += e;
      mine.moment += e * fmaxf(d, -1000.0f);  // 0 * -inf would be NaN; a NaN stays in e
    }
  }
  mine = merge_over_warp(mine, scale);
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < THREADS / WARP; i++) mine = merge_sums(mine, of_warps[i], scale);
    const int64_t place = label - rows.vocab_start - first;
    const bool chosen = place >= 0 && place < count && place < THREADS * PIECES * WIDTH;
    out[tile * rows.rows + row] = {
        mine.peak, mine.sum, mine.moment * LN_2, chosen ? value_of(x[place]) : NEGATIVE_INFINITY<float>};
  }
}

__device__ __forceinline__ Partial<float> folded(const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t row) {
  const float scale = inverse_temperature(rows, row);
  Partial<float> total = parts[row];
  for (int64_t i = 1; i < count; i++) total = merge(total, parts[i * rows.rows + row], scale);
  return total;
}

__global__ void __launch_bounds__(THREADS) fold_kernel(const Partial<float>* parts, int64_t count, LogitRows rows, Partial<float>* out) {
  const int64_t row = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (row < rows.rows) out[row] = folded(parts, count, rows, row);
}

__global__ void __launch_bounds__(THREADS) finish_kernel(
    const Partial<float>* parts, int64_t count, LogitRows rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum) {
  const int64_t row = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (row >= rows.rows) return;
  assert(rows.labels[row] < vocab_size);  // labels: one is not below the vocabulary size
  RowLogprob<float> result = {0.0f, 0.0f, 0.0f, 0.0f};
  if (rows.labels[row] >= 0) result = finish(folded(parts, count, rows, row), inverse_temperature(rows, row));
  logprobs[row] = result.logprob, entropy[row] = result.entropy, peak[row] = result.peak, log_sum[row] = result.log_sum;
}

template <class X, bool ALIGNED, bool WITH_ENTROPY>
__global__ void __launch_bounds__(THREADS) gradient_kernel(const X* logits, X* out, LogitRows rows, LogitGradient given, int tiles) {
  constexpr int WIDTH = Piece<X>::WIDTH;
  const int64_t row = blockIdx.x / unsigned(tiles);
  const int first = blockIdx.x % unsigned(tiles) * (THREADS * PIECES * WIDTH);
  const X* x = logits + row * rows.stride + first;
  X* dx = out + row * given.out_stride + first;
  const int count = rows.columns - first, width = rows.width - first;
  const int64_t label = rows.labels[row];
  const float by_logprob = given.grad_logprobs ? given.grad_logprobs[row] : 0.0f;
  const float by_entropy = WITH_ENTROPY ? given.grad_entropy[row] : 0.0f;
  if (label < 0 || (by_logprob == 0.0f && by_entropy == 0.0f)) {  // zeros, without reading the logits
    const X zeros[WIDTH] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++) Piece<X>::of(zeros).template store<ALIGNED>(dx + column_of<X>(i), width - column_of<X>(i));
    return;
  }
  Piece<X> pieces[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    pieces[i] = Piece<X>::template load<ALIGNED>(x + column_of<X>(i), count - column_of<X>(i), lowest<X>());
  }
  const float own_entropy = WITH_ENTROPY ? given.entropy[row] : 0.0f;
  const RowGradient<float> g = row_gradient(
      given.peak[row], given.log_sum[row], own_entropy, inverse_temperature(rows, row), by_logprob, by_entropy);
  const float scale = g.inverse_temperature * LOG2_E, log2_sum = g.log_sum * LOG2_E, slope = g.slope * LN_2;
  const int place = int(label - rows.vocab_start - first);
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int column = column_of<X>(i);
    X result[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      float log2_p = (value_of(pieces[i].element(j)) - g.peak) * scale - log2_sum;
      float p = fast_exp2(log2_p), dz = p * g.constant;
      if (WITH_ENTROPY) dz += p * (slope * fmaxf(log2_p, -1000.0f));
      if (column + j == place) dz = dz + g.chosen;  // in fp32, before rounding: near p = 1 the two nearly cancel
      result[j] = stored<X>(column + j < count ? dz : 0.0f);
    }
    Piece<X>::of(result).template store<ALIGNED>(dx + column, width - column);
  }
}

template <class X>
bool is_aligned(const X* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * sizeof(X) % 16 == 0;
}

int64_t blocks_for(int64_t rows) { return (rows + THREADS - 1) / THREADS; }

}  // namespace

template <class X>
void launch_partials(const X* logits, const LogitRows& rows, Partial<float>* out, cudaStream_t stream) {
  const int tiles = int(tiles_of(rows.columns, sizeof(X)));
  auto kernel = is_aligned(logits, rows.stride) ? partials_kernel<X, true> : partials_kernel<X, false>;
  launch(kernel, rows.rows * tiles, THREADS, stream, logits, rows, tiles, out);
}

template <class X>
void launch_gradient(const X* logits, X* out, const LogitRows& rows, const LogitGradient& gradient, cudaStream_t stream) {
  const int tiles = int(tiles_of(rows.width, sizeof(X)));
  auto run = [&](auto kernel) { launch(kernel, rows.rows * tiles, THREADS, stream, logits, out, rows, gradient, tiles); };
  const bool aligned = is_aligned(logits, rows.stride) && is_aligned(out, gradient.out_stride);
  if (gradient.grad_entropy) aligned ? run(gradient_kernel<X, true, true>) : run(gradient_kernel<X, false, true>);
  else aligned ? run(gradient_kernel<X, true, false>) : run(gradient_kernel<X, false, false>);
}

void launch_fold(const Partial<float>* parts, int64_t count, const LogitRows& rows, Partial<float>* out, cudaStream_t stream) {
  launch(fold_kernel, blocks_for(rows.rows), THREADS, stream, parts, count, rows, out);
}

void launch_finish(
    const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum, cudaStream_t stream) {
  launch(finish_kernel, blocks_for(rows.rows), THREADS, stream, parts, count, rows, vocab_size, logprobs, entropy, peak, log_sum);
}

#define FOR_STORED_TYPE(X)                                                                             \
  template void launch_partials<X>(const X*, const LogitRows&, Partial<float>*, cudaStream_t);          \
  template void launch_gradient<X>(const X*, X*, const LogitRows&, const LogitGradient&, cudaStream_t);
FOR_STORED_TYPE(float)
FOR_STORED_TYPE(BF16)
FOR_STORED_TYPE(F16)
