// The CPU library: it defines the operators' schemas and their CPU implementations.
#include "../operators.h"
#include "../schemas.h"
#include "rows.h"

const RowLoops& rows() {
  static const RowLoops& best = []() -> const RowLoops& {
#ifdef __x86_64__
    auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) return rows_avx512;
    auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2) return rows_avx2;
#endif
    return rows_baseline;
  }();
  return best;
}

std::tuple<Tensor, Tensor, Tensor> reply_tokens(
    Tensor content, int64_t vocab_size, int64_t at_most, double lowest, double highest);
Tensor fixed_order_linear(Tensor x, Tensor weight);
Tensor fixed_order_attention(
    Tensor query, Tensor key, Tensor value, Tensor query_bounds, Tensor key_bounds, double scale);
Tensor fixed_order_silu(Tensor x);

namespace {
std::string instruction_set() { return rows().instruction_set; }
}  // namespace

STABLE_TORCH_LIBRARY(megatron_rl, library) {
  define_operators(library);
  library.def("instruction_set() -> str");
  library.def(
      "reply_tokens(Tensor content, int vocab_size, int at_most, float lowest, float highest) "
      "-> (Tensor, Tensor, Tensor)");
  library.def("fixed_order_linear(Tensor x, Tensor weight) -> Tensor");
  library.def(
      "fixed_order_attention(Tensor query, Tensor key, Tensor value, Tensor query_bounds, Tensor key_bounds, "
      "float scale) -> Tensor");
  library.def("fixed_order_silu(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CPU, library) {
  implement_operators(library);
  library.impl("reply_tokens", TORCH_BOX(&reply_tokens));
  library.impl("fixed_order_linear", TORCH_BOX(&fixed_order_linear));
  library.impl("fixed_order_attention", TORCH_BOX(&fixed_order_attention));
  library.impl("fixed_order_silu", TORCH_BOX(&fixed_order_silu));
}

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CompositeExplicitAutograd, library) {
  library.impl("instruction_set", TORCH_BOX(&instruction_set));
}
