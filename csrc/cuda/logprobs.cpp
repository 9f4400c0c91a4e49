// Tensors in, launches out: the CUDA side of the log-probability operators.
#include "../kernels/logprobs.cuh"

#include "../operators.h"
#include "stream.h"

namespace {

LogitRows rows_of(
    const Tensor& labels, int64_t rows, double temperature, const OptionalTensor& temperatures) {
  return {rows, 0, 0, 0, 0, elements<int64_t>(labels, "labels", rows), float(temperature),
          elements_or_null<float>(temperatures, "temperatures", rows)};
}

LogitRows rows_of(
    const Tensor& logits, const Tensor& labels, double temperature, const OptionalTensor& temperatures,
    int64_t vocab_start, int64_t columns) {
  Logits shape(logits, columns);
  if (shape.width > 1 << 30) refuse("logits has ", shape.width, " columns: 2^30 are allowed");
  LogitRows rows = rows_of(labels, shape.rows, temperature, temperatures);
  rows.stride = shape.stride, rows.width = int(shape.width), rows.columns = int(columns), rows.vocab_start = vocab_start;
  return rows;
}

Partial<float>* partials_in(const Tensor& tensor, int64_t count) {
  return reinterpret_cast<Partial<float>*>(elements<float>(tensor, "partials", count * 4));
}

}  // namespace

Tensor logprob_partials(
    Tensor logits, Tensor labels, double temperature, OptionalTensor temperatures, int64_t vocab_start,
    int64_t columns, bool with_entropy) {
  OnDeviceOf device({"logits", logits}, {{"labels", labels}, {"temperatures", temperatures}});
  LogitRows rows = rows_of(logits, labels, temperature, temperatures, vocab_start, columns);
  Tensor out;
  with_stored_type<float, BF16, F16>(logits, "logits", [&]<class X>(X) {
    int64_t tiles = tiles_of(columns, sizeof(X));
    out = new_tensor(logits, {tiles, rows.rows, 4}, ScalarType::Float);
    launch_partials(
        static_cast<const X*>(logits.data_ptr()), rows, with_entropy, partials_in(out, tiles * rows.rows), device.stream);
  });
  return out;
}

Tensor logprob_fold(Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures) {
  OnDeviceOf device({"partials", partials}, {{"labels", labels}, {"temperatures", temperatures}});
  const int64_t parts = partials.size(0), count = partials.size(1);
  LogitRows rows = rows_of(labels, count, temperature, temperatures);
  Tensor out = new_tensor(partials, {1, count, 4}, ScalarType::Float);
  launch_fold(partials_in(partials, parts * count), parts, rows, partials_in(out, count), device.stream);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logprob_finish(
    Tensor, Tensor partials, Tensor labels, double temperature, OptionalTensor temperatures, int64_t, int64_t,
    int64_t vocab_size, bool) {
  OnDeviceOf device({"partials", partials}, {{"labels", labels}, {"temperatures", temperatures}});
  const int64_t parts = partials.size(0), count = partials.size(1);
  LogitRows rows = rows_of(labels, count, temperature, temperatures);
  auto column = [&] { return new_tensor(partials, {count}, ScalarType::Float); };
  auto data = [](const Tensor& tensor) { return static_cast<float*>(tensor.data_ptr()); };
  Tensor logprobs = column(), entropy = column(), peak = column(), log_sum = column();
  launch_finish(
      partials_in(partials, parts * count), parts, rows, vocab_size, data(logprobs), data(entropy), data(peak),
      data(log_sum), device.stream);
  return {logprobs, entropy, peak, log_sum};
}

void logprob_grad_into(
    Tensor out, Tensor logits, Tensor labels, Tensor peak, Tensor log_sum, Tensor entropy, OptionalTensor grad_logprobs,
    OptionalTensor grad_entropy, double temperature, OptionalTensor temperatures, int64_t vocab_start, int64_t columns) {
  OnDeviceOf device(
      {"logits", logits},
      {{"out", out}, {"labels", labels}, {"peak", peak}, {"log_sum", log_sum}, {"entropy", entropy}, {"grad_logprobs", grad_logprobs},
       {"grad_entropy", grad_entropy}, {"temperatures", temperatures}});
  LogitRows rows = rows_of(logits, labels, temperature, temperatures, vocab_start, columns);
  LogitGradient gradient = {
      elements<float>(peak, "peak", rows.rows),
      elements<float>(log_sum, "log_sum", rows.rows),
      elements<float>(entropy, "entropy", rows.rows),
      elements_or_null<float>(grad_logprobs, "grad_logprobs", rows.rows),
      elements_or_null<float>(grad_entropy, "grad_entropy", rows.rows),
      Logits(out, columns).stride,
  };
  with_gradient_types<float, BF16, F16>(logits, out, [&]<class X, class Y>(X, Y) {
    launch_gradient(
        static_cast<const X*>(logits.data_ptr()), static_cast<Y*>(out.data_ptr()), rows, gradient, device.stream);
  });
}
