// Tensors in, launches out: the CUDA side of packed GAE. Bounds are not read here; packing has checked them.
#include "../kernels/gae.cuh"

#include "../operators.h"
#include "stream.h"

std::tuple<Tensor, Tensor> packed_gae(
    Tensor rewards, Tensor values, Tensor mask, Tensor cu_seqlens, OptionalTensor bootstrap, double discount,
    double trace_decay) {
  OnDeviceOf device(
      {"values", values}, {{"rewards", rewards}, {"mask", mask}, {"cu_seqlens", cu_seqlens}, {"bootstrap", bootstrap}});
  const int64_t tokens = rewards.numel(), sequences = cu_seqlens.numel() - 1;
  GaeTokens given = {
      tokens,
      sequences,
      elements<float>(rewards, "rewards", tokens),
      elements<float>(values, "values", tokens),
      elements<bool>(mask, "mask", tokens),
      elements<int64_t>(cu_seqlens, "cu_seqlens", sequences + 1),
      elements_or_null<float>(bootstrap, "bootstrap", sequences),
      discount,
      trace_decay,
  };
  Tensor advantages = new_tensor(values, {tokens}, ScalarType::Float);
  Tensor returns = new_tensor(values, {tokens}, ScalarType::Float);
  Tensor of_tiles = new_tensor(values, {gae_tiles(tokens), sizeof(GaeMap) / sizeof(double)}, ScalarType::Double);
  launch_gae(
      given, static_cast<GaeMap*>(of_tiles.data_ptr()), static_cast<float*>(advantages.data_ptr()),
      static_cast<float*>(returns.data_ptr()), device.stream);
  return {advantages, returns};
}
