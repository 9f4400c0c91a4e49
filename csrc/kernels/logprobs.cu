// partials: a warp owns a slice (4 KB) of one row, reads it once into registers and finds its largest number before it
// takes exponentials; a block merges its warps, as many as a tile of the row fills, and leaves four floats for the tile.
// finish: a thread owns one row and merges its tiles in order. gradient: a warp owns one slice, reads and writes it once.
// All arithmetic is fp32. No atomics, and slices depend neither on the number of rows nor on where a row begins in
// memory: results repeat bit for bit.
#include "device.cuh"
#include "logprobs.cuh"

#include <algorithm>
#include <cassert>

namespace {

constexpr int MOST_WARPS = 8;  // of a block
constexpr int MOST_THREADS = MOST_WARPS * WARP;
constexpr int PIECES = 8;  // 16-byte loads of a thread, all in flight before the first is used
constexpr int SLICE_BYTES = WARP * PIECES * 16;
static_assert(MOST_WARPS * SLICE_BYTES == TILE_BYTES);

template <class X>
constexpr int SLICE = SLICE_BYTES / sizeof(X);  // columns

// Lanes own 16 bytes in turn: a lane's first piece begins here in its warp's slice, the others STEP columns further each.
template <class X>
__device__ __forceinline__ int first_column() {
  return int(threadIdx.x % WARP) * Piece<X>::WIDTH;
}
template <class X>
constexpr int STEP = SLICE<X> / PIECES;

// How many of its pieces a warp needs for these columns.
template <class X>
__device__ __forceinline__ int pieces_of(int columns) {
  return columns >= SLICE<X> ? PIECES : columns <= 0 ? 0 : (columns + STEP<X> - 1) / STEP<X>;
}

// Elements between the 16 bytes that an address lies in and the address.
template <class X>
__host__ __device__ __forceinline__ int past_sixteen(const X* pointer) {
  return int(reinterpret_cast<uintptr_t>(pointer) % 16 / sizeof(X));
}

template <class X>
__device__ __forceinline__ X lowest() {
  if constexpr (sizeof(X) == 4) return NEGATIVE_INFINITY<float>;
  else return {uint16_t(std::is_same_v<X, BF16> ? 0xff80 : 0xfc00)};
}

// The same number in all lanes of a warp, which the compiler is told by the exchange: it then keeps what depends on it in
// uniform registers.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(ALL_LANES, int(threadIdx.x) / WARP, 0); }

__device__ __forceinline__ int64_t row_of_block() { return int64_t(blockIdx.z) * gridDim.y + blockIdx.y; }

__device__ __forceinline__ float inverse_temperature(const LogitRows& rows, int64_t row) {
  return 1.0f / (rows.temperatures ? rows.temperatures[row] : rows.temperature);
}

// Loads columns [begin, end) of a slice that lies at x, a multiple of 16 bytes; begin lies in the first 16 of them.
// Pieces past the end become -inf, or are left as they are, which saves time where they are not looked at.
template <bool FILL, class X>
__device__ __forceinline__ void load_slice(const X* x, int begin, int end, Piece<X> (&pieces)[PIECES]) {
  const int column = first_column<X>();
  const X* mine = x + column;
  if (begin <= 0 && end >= SLICE<X>) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) pieces[i] = Piece<X>::load(mine + i * STEP<X>, 0, Piece<X>::WIDTH, lowest<X>());
  } else {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (!FILL && i >= pieces_of<X>(end)) continue;
      const int rest = end - column - i * STEP<X>;
      pieces[i] = Piece<X>::load(mine + i * STEP<X>, i == 0 ? begin - column : 0, rest, lowest<X>());
    }
  }
}

// Moves the numbers of a warp's pieces to the left by so many bytes; `next` are the words behind them. What follows a
// lane's piece is that of the lane above, and what follows the last lane's is the first lane's next piece.
template <int BYTES, class X>
__device__ __forceinline__ void move_left(Piece<X> (&pieces)[PIECES], uint32_t (&next)[4]) {
  constexpr int WORDS = (BYTES + 3) / 4;
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    uint32_t window[4 + WORDS];
#pragma unroll
    for (int k = 0; k < 4 + WORDS; k++) {
      if (k < 4) window[k] = pieces[i].words[k];
      else {
        const uint32_t later = i + 1 < PIECES ? pieces[i + 1].words[k - 4] : next[k - 4];
        window[k] = __shfl_sync(ALL_LANES, lane == 0 ? later : window[k - 4], (lane + 1) % WARP);
      }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      pieces[i].words[k] = BYTES == 2 ? __funnelshift_r(window[k], window[k + 1], 16) : window[k + WORDS];
    }
  }
#pragma unroll
  for (int k = 0; k + WORDS < 4; k++) next[k] = next[k + WORDS];
}

// As load_slice, of a row that begins `past` columns behind a multiple of 16 bytes. The columns end up in the lanes of
// those of an aligned row, so that sums are the same bits.
template <class X>
__device__ __forceinline__ void load_moved(const X* x, bool is_first, int count, Piece<X> (&pieces)[PIECES]) {
  using Half = Piece<X, Piece<X>::WIDTH / 2>;
  const int past = past_sixteen(x), end = count + past;
  const X *sixteen = x - past, *behind = sixteen + SLICE<X>;
  load_slice<true>(sixteen, is_first ? past : 0, end, pieces);
  if (past == 0) return;
  uint32_t next[4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Half half = Half::load(behind + i * Half::WIDTH, 0, end - SLICE<X> - i * Half::WIDTH, lowest<X>());
    next[2 * i] = half.words[0], next[2 * i + 1] = half.words[1];
  }
  const int bytes = past * int(sizeof(X));
  if (bytes & 8) move_left<8>(pieces, next);
  if (bytes & 4) move_left<4>(pieces, next);
  if (sizeof(X) == 2 && bytes & 2) move_left<2>(pieces, next);
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

// Sum and moment of a thread's numbers, relative to `origin` and `base` (below) and in units of log2. Careful where a
// number is -inf, whose 0 * -inf would be NaN, or where there is an origin. `sums` are the same bits either way.
template <bool CAREFUL, bool WITH_ENTROPY, class X>
__device__ __forceinline__ Sums sums_of(const Piece<X> (&pieces)[PIECES], int used, float origin, float base, float scale) {
  float sums[2] = {}, moments[2] = {};
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    if (i >= used) continue;
#pragma unroll
    for (int j = 0; j < Piece<X>::WIDTH; j++) {
      const float x = value_of(pieces[i].element(j));
      const float d = fmaf(CAREFUL ? x - origin : x, scale, -base), e = fast_exp2(d);
      sums[j % 2] += e;
      if (WITH_ENTROPY) moments[j % 2] += e * (CAREFUL ? fmaxf(d, -1000.0f) : d);  // a NaN stays in e
    }
  }
  return {0.0f, sums[0] + sums[1], moments[0] + moments[1]};
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

// (x - peak) * scale is formed as x * scale - peak * scale, one instruction, and what rounding the second product has left
// is taken out of the sums. Where that product overflows, the peak is subtracted first: it is the origin.
template <bool WITH_ENTROPY, class X>
__device__ __forceinline__ Sums sums_of_warp(const Piece<X> (&pieces)[PIECES], int used, float scale) {
  constexpr float INFINITE = -NEGATIVE_INFINITY<float>;
  if (used == 0) return {-INFINITE, 0.0f, 0.0f};
  float peak, least = 0.0f;
  if (used == PIECES) {
    peak = extreme_of<true>(pieces, PIECES);
    if (WITH_ENTROPY) least = extreme_of<false>(pieces, PIECES);
  } else {
    peak = extreme_of<true>(pieces, used);
    if (WITH_ENTROPY) least = extreme_of<false>(pieces, used);
  }
  peak = largest_over<WARP>(peak);
  const float finite_peak = peak == -INFINITE ? 0.0f : peak, product = finite_peak * scale;
  const bool overflows = !(fabsf(product) < INFINITE);
  const float origin = overflows ? finite_peak : 0.0f, base = overflows ? 0.0f : product;
  const float rest = fmaf(finite_peak - origin, scale, -base), factor = fast_exp2(-rest);
  const bool is_careful = used < PIECES || overflows || (WITH_ENTROPY && !(fabsf(fmaf(least, scale, -base)) < INFINITE));
  const Sums mine = __any_sync(ALL_LANES, is_careful) ? sums_of<true, WITH_ENTROPY>(pieces, used, origin, base, scale)
                                                      : sums_of<false, WITH_ENTROPY>(pieces, PIECES, 0.0f, base, scale);
  const float sum = sum_over<WARP>(mine.sum), moment = WITH_ENTROPY ? sum_over<WARP>(mine.moment) : 0.0f;
  return {peak, factor * sum, factor * (moment - rest * sum)};
}

// Lanes hold the sums of the block's warps, again and again every MOST_WARPS lanes.
__device__ __forceinline__ Sums merge_warps(const Sums& mine, float scale) {
  const float peak = largest_over<MOST_WARPS>(mine.peak);
  const float shift = peak == NEGATIVE_INFINITY<float> ? 0.0f : fmaxf((mine.peak - peak) * scale, -1000.0f);
  const float factor = fast_exp2(shift);
  // A warp without a finite column carries zeros, or the NaN that must not be lost.
  const float sum = mine.peak == NEGATIVE_INFINITY<float> ? mine.sum : factor * mine.sum;
  return {peak, sum_over<MOST_WARPS>(sum), sum_over<MOST_WARPS>(factor * (mine.moment + shift * mine.sum))};
}

// Without entropy its moment is NaN.
template <class X, bool ALIGNED, bool WITH_ENTROPY>
__global__ void __launch_bounds__(MOST_THREADS, 4) partials_kernel(const X* logits, LogitRows rows, Partial<float>* out) {
  __shared__ Sums of_warps[MOST_WARPS];
  const int64_t row = row_of_block();
  if (row >= rows.rows) return;
  const int tile = blockIdx.x, warps = blockDim.x / WARP, warp = warp_of_block();
  const int64_t label = rows.labels[row];
  if (label < 0) {  // the logits are not read
    if (threadIdx.x == 0) out[tile * rows.rows + row] = nothing<float>();
    return;
  }
  const int first = (tile * warps + warp) * SLICE<X>, count = rows.columns - first;
  const X* x = logits + row * rows.stride + first;
  Piece<X> pieces[PIECES];
  if (ALIGNED) load_slice<false>(x, 0, count, pieces);
  else load_moved(x, first == 0, count, pieces);
  const int place = int(label - rows.vocab_start) - first;  // in the tile, for its first thread
  float chosen = NEGATIVE_INFINITY<float>;
  if (threadIdx.x == 0 && place >= 0 && place < count && place < warps * SLICE<X>) chosen = value_of(x[place]);
  const float scale = inverse_temperature(rows, row) * LOG2_E;
  const Sums mine = sums_of_warp<WITH_ENTROPY>(pieces, pieces_of<X>(count), scale);
  if (threadIdx.x % WARP == 0) of_warps[warp] = mine;
  __syncthreads();
  if (threadIdx.x >= WARP) return;
  const int other = threadIdx.x % MOST_WARPS;
  const Sums all = merge_warps(other < warps ? of_warps[other] : Sums{NEGATIVE_INFINITY<float>, 0.0f, 0.0f}, scale);
  const float moment = WITH_ENTROPY ? all.moment * LN_2 : NAN;
  if (threadIdx.x == 0) out[tile * rows.rows + row] = {all.peak, all.sum, moment, chosen};
}

__device__ __forceinline__ Partial<float> folded(const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t row) {
  const float scale = inverse_temperature(rows, row);
  Partial<float> total = parts[row];
  for (int64_t i = 1; i < count; i++) total = merge(total, parts[i * rows.rows + row], scale);
  return total;
}

__global__ void __launch_bounds__(MOST_THREADS) fold_kernel(const Partial<float>* parts, int64_t count, LogitRows rows, Partial<float>* out) {
  const int64_t row = int64_t(blockIdx.x) * MOST_THREADS + threadIdx.x;
  if (row < rows.rows) out[row] = folded(parts, count, rows, row);
}

__global__ void __launch_bounds__(MOST_THREADS) finish_kernel(
    const Partial<float>* parts, int64_t count, LogitRows rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum) {
  const int64_t row = int64_t(blockIdx.x) * MOST_THREADS + threadIdx.x;
  if (row >= rows.rows) return;
  assert(rows.labels[row] < vocab_size);  // labels: one is not below the vocabulary size
  RowLogprob<float> result = {0.0f, 0.0f, 0.0f, 0.0f};
  if (rows.labels[row] >= 0) result = finish(folded(parts, count, rows, row), inverse_temperature(rows, row));
  logprobs[row] = result.logprob, entropy[row] = result.entropy, peak[row] = result.peak, log_sum[row] = result.log_sum;
}

// X is read, Y is written. A row that begins `past` columns behind a multiple of 16 bytes is cut into slices from there,
// so that whole pieces are aligned; what is `past` and what is behind the row is other rows'.
template <class X, class Y, bool ALIGNED, bool WITH_ENTROPY>
__global__ void __launch_bounds__(MOST_THREADS, WITH_ENTROPY ? 4 : 5) gradient_kernel(
    const X* logits, Y* out, LogitRows rows, LogitGradient given) {
  constexpr int WIDTH = Piece<X>::WIDTH;
  using Result = Piece<Y, WIDTH>;
  const int64_t row = row_of_block();
  if (row >= rows.rows) return;
  const int warps = blockDim.x / WARP, warp = warp_of_block();
  const int past = ALIGNED ? 0 : past_sixteen(logits + row * rows.stride);
  const int first = (int(blockIdx.x) * warps + warp) * SLICE<X> - past;
  const int begin = ALIGNED ? 0 : -min(first, 0);
  const X* x = logits + row * rows.stride + first;
  Y* dx = out + row * given.out_stride + first;
  const bool aligned = ALIGNED || reinterpret_cast<uintptr_t>(dx) % sizeof(Result) == 0;
  const int count = rows.columns - first, width = rows.width - first, used = pieces_of<X>(width);
  const int64_t label = rows.labels[row];
  const float by_logprob = given.grad_logprobs ? given.grad_logprobs[row] : 0.0f;
  const float by_entropy = WITH_ENTROPY ? given.grad_entropy[row] : 0.0f;
  const int column = first_column<X>();
  Y* mine = dx + column;
  float result[WIDTH] = {};
  if (label < 0 || (by_logprob == 0.0f && by_entropy == 0.0f)) {  // zeros, without reading the logits
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int at = i * STEP<X>;
      if (i < used) Result::rounded(result).store(mine + at, begin - column - at, width - column - at, aligned);
    }
    return;
  }
  Piece<X> pieces[PIECES];
  load_slice<false>(x, begin, count, pieces);
  const float own_entropy = WITH_ENTROPY && by_entropy != 0.0f ? given.entropy[row] : 0.0f;  // NaN where it is not known
  const RowGradient<float> g = row_gradient(
      given.peak[row], given.log_sum[row], own_entropy, inverse_temperature(rows, row), by_logprob, by_entropy);
  const float scale = g.inverse_temperature * LOG2_E, log2_sum = g.log_sum * LOG2_E, slope = g.slope * LN_2;
  auto of = [&](float value) {
    const float log2_p = (value - g.peak) * scale - log2_sum, p = fast_exp2(log2_p);
    return p * (WITH_ENTROPY ? fmaf(slope, fmaxf(log2_p, -1000.0f), g.constant) : g.constant);
  };
  // The label's column is written once more by its thread: `chosen` is added in fp32, as near p = 1 the two nearly cancel.
  const int place = int(label - rows.vocab_start) - first;
  const bool owns = place >= begin && place < min(count, SLICE<X>) && place / WIDTH % WARP == int(threadIdx.x) % WARP;
  const float own = owns ? value_of(x[place]) : 0.0f;  // before it is overwritten
  if (begin == 0 && count >= SLICE<X>) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++) result[j] = of(value_of(pieces[i].element(j)));
      Result::rounded(result).store(mine + i * STEP<X>, 0, WIDTH, aligned);
    }
  } else {
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      if (i >= used) continue;
      const int at = i * STEP<X>;
#pragma unroll
      for (int j = 0; j < WIDTH; j++) result[j] = column + at + j < count ? of(value_of(pieces[i].element(j))) : 0.0f;
      Result::rounded(result).store(mine + at, begin - column - at, width - column - at, aligned);
    }
  }
  if (owns) dx[place] = stored<Y>(of(own) + g.chosen);
}

template <class X>
bool is_aligned(const X* pointer, int64_t stride) {
  return past_sixteen(pointer) == 0 && stride * sizeof(X) % 16 == 0;
}

// A block for each tile of each row, of as many warps as a tile fills where a row is cut into equal tiles: 18,992 columns
// of 16 bits are two tiles of five warps. A grid's y and z are at most 65,535: together they are the row.
template <class X, class... Parameters, class... Arguments>
void launch_tiles(void (*kernel)(Parameters...), int64_t rows, int64_t columns, cudaStream_t stream, Arguments... arguments) {
  constexpr int64_t MOST = 65535;
  const int64_t tiles = tiles_of(columns, sizeof(X)), slices = (columns + SLICE<X> - 1) / SLICE<X>;
  const int64_t warps = slices > tiles ? (slices + tiles - 1) / tiles : 1;
  launch(kernel, dim3(tiles, std::min(rows, MOST), (rows + MOST - 1) / MOST), int(warps * WARP), stream, arguments...);
}

int64_t blocks_for(int64_t rows) { return (rows + MOST_THREADS - 1) / MOST_THREADS; }

}  // namespace

template <class X>
void launch_partials(
    const X* logits, const LogitRows& rows, bool with_entropy, Partial<float>* out, cudaStream_t stream) {
  auto run = [&](auto kernel) { launch_tiles<X>(kernel, rows.rows, rows.columns, stream, logits, rows, out); };
  const bool aligned = is_aligned(logits, rows.stride);
  if (with_entropy) aligned ? run(partials_kernel<X, true, true>) : run(partials_kernel<X, false, true>);
  else aligned ? run(partials_kernel<X, true, false>) : run(partials_kernel<X, false, false>);
}

template <class X, class Y>
void launch_gradient(const X* logits, Y* out, const LogitRows& rows, const LogitGradient& gradient, cudaStream_t stream) {
  const bool aligned = is_aligned(logits, rows.stride) && is_aligned(out, gradient.out_stride);
  const int64_t columns = rows.width + (aligned ? 0 : Piece<X>::WIDTH - 1);  // a row may begin late in its first piece
  auto run = [&](auto kernel) { launch_tiles<X>(kernel, rows.rows, columns, stream, logits, out, rows, gradient); };
  if (gradient.grad_entropy) aligned ? run(gradient_kernel<X, Y, true, true>) : run(gradient_kernel<X, Y, false, true>);
  else aligned ? run(gradient_kernel<X, Y, true, false>) : run(gradient_kernel<X, Y, false, false>);
}

void launch_fold(const Partial<float>* parts, int64_t count, const LogitRows& rows, Partial<float>* out, cudaStream_t stream) {
  launch(fold_kernel, blocks_for(rows.rows), MOST_THREADS, stream, parts, count, rows, out);
}

void launch_finish(
    const Partial<float>* parts, int64_t count, const LogitRows& rows, int64_t vocab_size, float* logprobs, float* entropy,
    float* peak, float* log_sum, cudaStream_t stream) {
  launch(finish_kernel, blocks_for(rows.rows), MOST_THREADS, stream, parts, count, rows, vocab_size, logprobs, entropy, peak, log_sum);
}

#define INSTANTIATE_PARTIALS(X) \
  template void launch_partials<X>(const X*, const LogitRows&, bool, Partial<float>*, cudaStream_t);
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
