// partials: a block owns one tile (32 KB) of one row, reads it once into registers and leaves four floats. A warp finds its
// largest number before it takes exponentials, so that warps, and not threads, are merged.
// finish: a thread owns one row and merges its tiles in order. gradient: a block owns one tile, reads and writes it once.
// All arithmetic is fp32. No atomics, and the tiles do not depend on the number of rows: results repeat bit for bit.
#include "device.cuh"
#include "logprobs.cuh"

#include <cassert>

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int PIECES = 8;  // 16-byte loads of a thread, all in flight before the first is used
static_assert(THREADS * PIECES * 16 == TILE_BYTES);

template <class X>
constexpr int TILE = TILE_BYTES / sizeof(X);  // columns

// How many of its pieces a block needs for these columns.
template <class X>
__device__ __forceinline__ int pieces_of(int columns) {
  return columns >= TILE<X> ? PIECES : (columns + TILE<X> / PIECES - 1) / (TILE<X> / PIECES);
}

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

// Loads the pieces that the columns need; the others stay as they are, and are not read.
template <class X, bool ALIGNED>
__device__ __forceinline__ void load_tile(const X* x, int count, Piece<X> (&pieces)[PIECES]) {
  if (count >= TILE<X>) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      pieces[i] = Piece<X>::template load<ALIGNED>(x + column_of<X>(i), Piece<X>::WIDTH, lowest<X>());
    }
  } else {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= pieces_of<X>(count)) continue;
      pieces[i] = Piece<X>::template load<ALIGNED>(x + column_of<X>(i), count - column_of<X>(i), lowest<X>());
    }
  }
}

// The largest, or the least, number of a thread. NaN is passed over.
template <bool LARGEST, class X>
__device__ __forceinline__ float extreme_of(const Piece<X> (&pieces)[PIECES], int used) {
  const float start = LARGEST ? NEGATIVE_INFINITY<float> : -NEGATIVE_INFINITY<float>;
  auto of = [](float a, float b) { return LARGEST ? fmaxf(a, b) : fminf(a, b); };
  if constexpr (sizeof(X) == 4) {
    float found = start;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= used) continue;
#pragma unroll
      for (int j = 0; j < Piece<X>::WIDTH; j++) found = of(found, pieces[i].element(j));
    }
    return found;
  } else {
    auto of_pairs = [](uint32_t a, uint32_t b) { return extreme_pair<X, LARGEST>(a, b); };
    uint32_t found = pieces[0].words[0];
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= used) continue;
      const auto& words = pieces[i].words;
      found = of_pairs(found, of_pairs(of_pairs(words[0], words[1]), of_pairs(words[2], words[3])));
    }
    const float2 both = values_of_pair<X>(found);
    return of(of(start, both.x), both.y);
  }
}

// Sums in powers of two: moment is in units of log2 until the block is done.
struct Sums {
  float peak, sum, moment;
};

// Sum and moment of a thread's numbers relative to the peak, in units of log2. Careful where a number is -inf or a product
// with the scale overflows: 0 * -inf would be NaN. Otherwise d = x * scale - peak * scale is one instruction, and the
// caller takes out what rounding peak * scale has left in it.
template <bool CAREFUL, class X>
__device__ __forceinline__ Sums sums_of(const Piece<X> (&pieces)[PIECES], int used, float peak, float scale) {
  const float base = peak * scale;
  float sums[2] = {}, moments[2] = {};
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    if (i >= used) continue;
#pragma unroll
    for (int j = 0; j < Piece<X>::WIDTH; j++) {
      const float x = value_of(pieces[i].element(j));
      const float d = CAREFUL ? (x - peak) * scale : fmaf(x, scale, -base), e = fast_exp2(d);
      sums[j % 2] += e;
      moments[j % 2] += e * (CAREFUL ? fmaxf(d, -1000.0f) : d);  // a NaN stays in e
    }
  }
  return {peak, sums[0] + sums[1], moments[0] + moments[1]};
}

template <int LANES>
__device__ __forceinline__ float largest_over(float x) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, mask));
  return x;
}

template <int LANES>
__device__ __forceinline__ float sum_over(float x) {
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(ALL_LANES, x, mask);
  return x;
}

template <class X>
__device__ __forceinline__ Sums sums_of_warp(const Piece<X> (&pieces)[PIECES], int used, float scale) {
  float peak, least;
  if (used == PIECES) peak = extreme_of<true>(pieces, PIECES), least = extreme_of<false>(pieces, PIECES);
  else peak = extreme_of<true>(pieces, used), least = extreme_of<false>(pieces, used);
  peak = largest_over<WARP>(peak);
  const float finite_peak = peak == NEGATIVE_INFINITY<float> ? 0.0f : peak, base = finite_peak * scale;
  const float deepest = fmaf(least, scale, -base);
  Sums mine;
  float rest = 0.0f;
  const bool is_careful = used < PIECES || !(fabsf(deepest) < -NEGATIVE_INFINITY<float>);
  if (__any_sync(ALL_LANES, is_careful)) {
    mine = sums_of<true>(pieces, used, finite_peak, scale);
  } else {
    mine = sums_of<false>(pieces, PIECES, finite_peak, scale);
    rest = fmaf(finite_peak, scale, -base);
  }
  const float sum = sum_over<WARP>(mine.sum), moment = sum_over<WARP>(mine.moment), factor = fast_exp2(-rest);
  return {peak, factor * sum, factor * (moment - rest * sum)};
}

// The lanes of one warp hold the sums of the block's warps, again and again.
__device__ __forceinline__ Sums merge_warps(const Sums& mine, float scale) {
  const float peak = largest_over<WARPS>(mine.peak);
  const float shift = peak == NEGATIVE_INFINITY<float> ? 0.0f : fmaxf((mine.peak - peak) * scale, -1000.0f);
  const float factor = fast_exp2(shift);
  // A warp without a finite column carries zeros, or the NaN that must not be lost.
  const float sum = mine.peak == NEGATIVE_INFINITY<float> ? mine.sum : factor * mine.sum;
  return {peak, sum_over<WARPS>(sum), sum_over<WARPS>(factor * (mine.moment + shift * mine.sum))};
}

template <class X, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 4) partials_kernel(const X* logits, LogitRows rows, int tiles, Partial<float>* out) {
  __shared__ Sums of_warps[WARPS];
  const int64_t row = blockIdx.x / unsigned(tiles);
  const int tile = blockIdx.x % unsigned(tiles), first = tile * TILE<X>;
  const int64_t label = rows.labels[row];
  if (label < 0) {  // the logits are not read
    if (threadIdx.x == 0) out[tile * rows.rows + row] = nothing<float>();
    return;
  }
  const X* x = logits + row * rows.stride + first;
  const int count = rows.columns - first;
  Piece<X> pieces[PIECES];
  load_tile<X, ALIGNED>(x, count, pieces);
  const int64_t place = label - rows.vocab_start - first;
  float chosen = NEGATIVE_INFINITY<float>;
  if (threadIdx.x == 0 && place >= 0 && place < count && place < TILE<X>) chosen = value_of(x[place]);
  const float scale = inverse_temperature(rows, row) * LOG2_E;
  const Sums mine = sums_of_warp<X>(pieces, pieces_of<X>(count), scale);
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = mine;
  __syncthreads();
  if (threadIdx.x >= WARP) return;
  const Sums all = merge_warps(of_warps[threadIdx.x % WARPS], scale);
  if (threadIdx.x == 0) out[tile * rows.rows + row] = {all.peak, all.sum, all.moment * LN_2, chosen};
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

// X is read, Y is written.
template <class X, class Y, bool ALIGNED, bool WITH_ENTROPY>
__global__ void __launch_bounds__(THREADS) gradient_kernel(const X* logits, Y* out, LogitRows rows, LogitGradient given, int tiles) {
  constexpr int WIDTH = Piece<X>::WIDTH;
  using Result = Piece<Y, WIDTH>;
  const int64_t row = blockIdx.x / unsigned(tiles);
  const int first = blockIdx.x % unsigned(tiles) * TILE<X>;
  const X* x = logits + row * rows.stride + first;
  Y* dx = out + row * given.out_stride + first;
  const int count = rows.columns - first, width = rows.width - first, used = pieces_of<X>(width);
  const int64_t label = rows.labels[row];
  const float by_logprob = given.grad_logprobs ? given.grad_logprobs[row] : 0.0f;
  const float by_entropy = WITH_ENTROPY ? given.grad_entropy[row] : 0.0f;
  float result[WIDTH] = {};
  if (label < 0 || (by_logprob == 0.0f && by_entropy == 0.0f)) {  // zeros, without reading the logits
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i < used) Result::rounded(result).template store<ALIGNED>(dx + column_of<X>(i), width - column_of<X>(i));
    }
    return;
  }
  Piece<X> pieces[PIECES];
  load_tile<X, ALIGNED>(x, count, pieces);
  const float own_entropy = WITH_ENTROPY ? given.entropy[row] : 0.0f;
  const RowGradient<float> g = row_gradient(
      given.peak[row], given.log_sum[row], own_entropy, inverse_temperature(rows, row), by_logprob, by_entropy);
  const float scale = g.inverse_temperature * LOG2_E, log2_sum = g.log_sum * LOG2_E, slope = g.slope * LN_2;
  auto of = [&](float value) {
    const float log2_p = (value - g.peak) * scale - log2_sum, p = fast_exp2(log2_p);
    return p * (WITH_ENTROPY ? fmaf(slope, fmaxf(log2_p, -1000.0f), g.constant) : g.constant);
  };
  // The label's column is written once more by its thread: `chosen` is added in fp32, as near p = 1 the two nearly cancel.
  const int place = int(label - rows.vocab_start - first);
  const bool owns = place >= 0 && place < min(count, TILE<X>) && place / WIDTH % THREADS == int(threadIdx.x);
  const float own = owns ? value_of(x[place]) : 0.0f;  // before it is overwritten
  if (count >= TILE<X>) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++) result[j] = of(value_of(pieces[i].element(j)));
      Result::rounded(result).template store<ALIGNED>(dx + column_of<X>(i), WIDTH);
    }
  } else {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= used) continue;
      const int column = column_of<X>(i);
#pragma unroll
      for (int j = 0; j < WIDTH; j++) result[j] = column + j < count ? of(value_of(pieces[i].element(j))) : 0.0f;
      Result::rounded(result).template store<ALIGNED>(dx + column, width - column);
    }
  }
  if (owns) dx[place] = stored<Y>(of(own) + g.chosen);
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

template <class X, class Y>
void launch_gradient(const X* logits, Y* out, const LogitRows& rows, const LogitGradient& gradient, cudaStream_t stream) {
  const int tiles = int(tiles_of(rows.width, sizeof(X)));
  auto run = [&](auto kernel) { launch(kernel, rows.rows * tiles, THREADS, stream, logits, out, rows, gradient, tiles); };
  const bool aligned = is_aligned(logits, rows.stride) && is_aligned(out, gradient.out_stride);
  if (gradient.grad_entropy) aligned ? run(gradient_kernel<X, Y, true, true>) : run(gradient_kernel<X, Y, false, true>);
  else aligned ? run(gradient_kernel<X, Y, true, false>) : run(gradient_kernel<X, Y, false, false>);
}

void launch_fold(const Partial<float>* parts, int64_t count, const LogitRows& rows, Partial<float>* out, cudaStream_t stream) {
  launch(fold_kernel, blocks_for(rows.rows), THREADS, stream, parts, count, rows, out);
}

void launch_finish(
    const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum, cudaStream_t stream) {
  launch(finish_kernel, blocks_for(rows.rows), THREADS, stream, parts, count, rows, vocab_size, logprobs, entropy, peak, log_sum);
}

#define INSTANTIATE_PARTIALS(X) \
  template void launch_partials<X>(const X*, const LogitRows&, Partial<float>*, cudaStream_t);
#define INSTANTIATE_GRADIENT(X, Y) \
  template void launch_gradient<X, Y>(const X*, Y*, const LogitRows&, const LogitGradient&, cudaStream_t);
INSTANTIATE_PARTIALS(float)
INSTANTIATE_PARTIALS(BF16)
INSTANTIATE_PARTIALS(F16)
INSTANTIATE_GRADIENT(float, float)
INSTANTIATE_GRADIENT(BF16, BF16)
INSTANTIATE_GRADIENT(F16, F16)
INSTANTIATE_GRADIENT(float, BF16)
INSTANTIATE_GRADIENT(float, F16)
