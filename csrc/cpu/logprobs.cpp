// Log-probability, entropy and their gradient on the CPU. Work is cut into (row, tile); a tile never leaves its thread, so
// results do not depend on the number of threads or of rows.
#include "../operators.h"
#include "rows.h"

namespace {

template <class X>
constexpr Stored STORED_AS = __is_same(X, float) ? FLOAT32 : __is_same(X, double) ? FLOAT64 : __is_same(X, BF16) ? BFLOAT16 : FLOAT16;

double inverse_of(const Temperature& temperature, int64_t row) {
  return 1.0 / (temperature.each ? double(temperature.each[row]) : temperature.all);
}

// Tiles of one row that a thread takes at once: about a microsecond of work at least.
int64_t grain_of(int64_t columns) { return columns > 4096 ? 1 : 4096 / (columns + 1) + 1; }

template <class X>
void partials_of(
    const Tensor& logits, const Logits& shape, const int64_t* labels, const Temperature& temperature, int64_t start,
    int64_t columns, bool with_entropy, const Tensor& out) {
  using A = typename Accumulator<X>::type;
  const X* x = static_cast<const X*>(logits.data_ptr());
  auto* found = reinterpret_cast<Partial<A>*>(out.data_ptr());
  const int64_t tile = TILE_BYTES / sizeof(X), tiles = tiles_of(columns, sizeof(X));
  torch::stable::parallel_for(0, shape.rows * tiles, grain_of(columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = i / tiles, first = i % tiles * tile;
      if (labels[row] < 0) {  // the logits are not read
        found[i % tiles * shape.rows + row] = nothing<A>();
        continue;
      }
      int64_t count = std::min(tile, columns - first), label = labels[row] - start - first;
      const X* at = x + row * shape.stride + first;
      Partial<double> p = rows().partial[with_entropy][STORED_AS<X>](at, count, inverse_of(temperature, row));
      if (label >= 0 && label < count) p.chosen = value_of(at[label]);
      found[i % tiles * shape.rows + row] = {A(p.peak), A(p.sum), A(p.moment), A(p.chosen)};
    }
  });
}

template <class A>
Partial<double> folded(const Partial<A>* parts, int64_t count, int64_t rows, int64_t row, double inverse_temperature) {
  Partial<double> total = nothing<double>();
  for (int64_t i = 0; i < count; i++) {
    const Partial<A>& p = parts[i * rows + row];
    total = merge(total, {p.peak, p.sum, p.moment, p.chosen}, inverse_temperature);
  }
  return total;
}

template <class X, class Y>  // X is read, Y is written
void gradient_of(
    const Tensor& logits, const Tensor& out, const int64_t* labels, const Tensor& peak, const Tensor& log_sum,
    const Tensor& entropy, const OptionalTensor& grad_logprobs, const OptionalTensor& grad_entropy,
    const Temperature& temperature, int64_t start, int64_t columns) {
  using A = typename Accumulator<X>::type;
  const Logits from(logits, columns), to(out, columns);
  const int64_t rows_count = from.rows;
  const A* peaks = elements<A>(peak, "peak", rows_count);
  const A* log_sums = elements<A>(log_sum, "log_sum", rows_count);
  const A* entropies = elements<A>(entropy, "entropy", rows_count);
  const A* of_logprobs = elements_or_null<A>(grad_logprobs, "grad_logprobs", rows_count);
  const A* of_entropy = elements_or_null<A>(grad_entropy, "grad_entropy", rows_count);
  const X* x = static_cast<const X*>(logits.data_ptr());
  Y* dx = static_cast<Y*>(out.data_ptr());
  const int64_t tile = TILE_BYTES / sizeof(X), tiles = tiles_of(from.width, sizeof(X));
  torch::stable::parallel_for(0, rows_count * tiles, grain_of(from.width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = i / tiles, first = i % tiles * tile;
      int64_t width = std::min(tile, from.width - first), count = std::min(width, std::max<int64_t>(columns - first, 0));
      Y* result = dx + row * to.stride + first;
      double by_logprob = of_logprobs ? of_logprobs[row] : 0.0, by_entropy = of_entropy ? of_entropy[row] : 0.0;
      if (labels[row] < 0 || (by_logprob == 0 && by_entropy == 0)) {
        memset(result, 0, width * sizeof(Y));  // the logits are not read
        continue;
      }
      const double own_entropy = by_entropy == 0 ? 0.0 : entropies[row];  // NaN where it was not computed
      auto gradient = row_gradient<double>(
          peaks[row], log_sums[row], own_entropy, inverse_of(temperature, row), by_logprob, by_entropy);
      const X* at = x + row * from.stride + first;
      int64_t label = labels[row] - start - first;
      bool chosen = label >= 0 && label < count;
      double x_label = chosen ? value_of(at[label]) : 0.0;  // before it is overwritten
      rows().gradient[STORED_AS<X>][STORED_AS<Y>](at, result, count, gradient);
      if (chosen) {  // g (1 - p) is formed before rounding: where p is near 1 its digits would cancel
        double log_p = (x_label - gradient.peak) * gradient.inverse_temperature - gradient.log_sum;
        double rest = by_entropy == 0 ? 0.0 : std::exp(log_p) * gradient.slope * (log_p + own_entropy);
        double dx_label = -gradient.chosen * std::expm1(log_p) + (log_p == NEGATIVE_INFINITY<double> ? 0.0 : rest);
        if constexpr (__is_same(Y, double)) {
          result[label] = dx_label;
        } else {
          result[label] = stored<Y>(float(dx_label));
        }
      }
      memset(result + count, 0, (width - count) * sizeof(Y));
    }
  });
}

}  // namespace

Tensor logprob_partials(
    Tensor logits, Tensor labels, double temperature, OptionalTensor temperatures, int64_t vocab_start,
    int64_t columns, bool with_entropy) {
  Logits shape(logits, columns);
  Temperature heat(temperature, temperatures, shape.rows);
  const int64_t* label = elements<int64_t>(labels, "labels", shape.rows);
  Tensor out;
  with_stored_type<float, double, BF16, F16>(logits, "logits", [&]<class X>(X) {
    using A = typename Accumulator<X>::type;
    out = new_tensor(logits, {tiles_of(columns, sizeof(X)), shape.rows, 4}, TypeOf<A>::type);
    partials_of<X>(logits, shape, label, heat, vocab_start, columns, with_entropy, out);
  });
  return out;
}

Tensor logprob_fold(Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures) {
  const int64_t parts = partials.size(0), rows_count = partials.size(1);
  Temperature heat(temperature, temperatures, rows_count);
  const int64_t* label = elements<int64_t>(labels, "labels", rows_count);
  Tensor out = new_tensor(partials, {1, rows_count, 4}, partials.scalar_type());
  with_stored_type<float, double>(partials, "partials", [&]<class A>(A) {
    auto* part = reinterpret_cast<Partial<A>*>(elements<A>(partials, "partials", parts * rows_count * 4));
    auto* to = reinterpret_cast<Partial<A>*>(out.data_ptr());
    for (int64_t row = 0; row < rows_count; row++) {
      Partial<double> p = folded(part, parts, rows_count, row, inverse_of(heat, row));
      to[row] = {A(p.peak), A(p.sum), A(p.moment), A(p.chosen)};
    }
  });
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprob_finish(
    Tensor, Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures, int64_t, int64_t,
    int64_t vocab_size, bool) {
  const int64_t parts = partials.size(0), rows_count = partials.size(1);
  Temperature heat(temperature, temperatures, rows_count);
  const int64_t* label = elements<int64_t>(labels, "labels", rows_count);
  auto column = [&] { return new_tensor(partials, {rows_count}, partials.scalar_type()); };
  Tensor logprobs = column(), entropy = column(), peak = column(), log_sum = column();
  with_stored_type<float, double>(partials, "partials", [&]<class A>(A) {
    auto* part = reinterpret_cast<Partial<A>*>(elements<A>(partials, "partials", parts * rows_count * 4));
    for (int64_t row = 0; row < rows_count; row++) {
      RowLogprob<double> result = {};
      if (label[row] >= vocab_size) {
        refuse("labels[", row, "] is ", label[row], ": a label is below the vocabulary size ", vocab_size,
               ", or negative to be ignored");
      }
      if (label[row] >= 0) {
        double inverse_temperature = inverse_of(heat, row);
        result = finish(folded(part, parts, rows_count, row, inverse_temperature), inverse_temperature);
      }
      static_cast<A*>(logprobs.data_ptr())[row] = A(result.logprob);
      static_cast<A*>(entropy.data_ptr())[row] = A(result.entropy);
      static_cast<A*>(peak.data_ptr())[row] = A(result.peak);
      static_cast<A*>(log_sum.data_ptr())[row] = A(result.log_sum);
    }
  });
  return {logprobs, entropy, peak, log_sum};
}

void logprob_grad_into(
    Tensor out, Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, OptionalTensor grad_logprobs,
    OptionalTensor grad_entropy, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns) {
  Logits shape(logits, columns);
  Temperature heat(temperature, temperatures, shape.rows);
  const int64_t* label = elements<int64_t>(labels, "labels", shape.rows);
  with_gradient_types<float, double, BF16, F16>(logits, out, [&]<class X, class Y>(X, Y) {
    gradient_of<X, Y>(
        logits, out, label, peak, log_sum, entropy, grad_logprobs, grad_entropy, heat, vocab_start, columns);
  });
}
