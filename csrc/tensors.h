// What the bindings share: checks that name the tensor and what it got, typed pointers, new tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "math/numbers.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline std::string text_of(const std::string& text) { return text; }
template <class Number>
  requires std::is_integral_v<Number>
std::string text_of(Number number) {
  return std::to_string(number);
}

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::runtime_error((std::string() + ... + text_of(parts)));
}

template <class X>
struct TypeOf;
#define STORED_AS(X, NAME, TEXT)                      \
  template <>                                         \
  struct TypeOf<X> {                                  \
    static constexpr ScalarType type = ScalarType::NAME; \
    static constexpr const char* name = TEXT;         \
  };
STORED_AS(float, Float, "float32")
STORED_AS(double, Double, "float64")
STORED_AS(BF16, BFloat16, "bfloat16")
STORED_AS(F16, Half, "float16")
STORED_AS(int64_t, Long, "int64")
STORED_AS(bool, Bool, "bool")
#undef STORED_AS

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); i++) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "]";
}

// A contiguous tensor of type X with `count` elements, or an error that names it.
template <class X>
X* elements(const Tensor& tensor, const char* name, int64_t count) {
  if (tensor.scalar_type() != TypeOf<X>::type) {
    refuse(name, " has dtype ", int(tensor.scalar_type()), " (torch's number): it must be ", TypeOf<X>::name, " here");
  }
  if (tensor.numel() != count) refuse(name, " has shape ", shape_of(tensor), ": ", count, " elements are needed");
  if (!tensor.is_contiguous()) refuse(name, " is not contiguous: pass ", name, ".contiguous()");
  return static_cast<X*>(tensor.data_ptr());
}

inline int64_t nbytes_of(const Tensor& tensor) {
  if (!tensor.is_contiguous()) refuse("a tensor is not contiguous: pass tensor.contiguous()");
  return tensor.numel() * tensor.element_size();
}

template <class X>
X* elements_or_null(const OptionalTensor& tensor, const char* name, int64_t count) {
  return tensor ? elements<X>(*tensor, name, count) : nullptr;
}

inline Tensor new_tensor(const Tensor& like, std::vector<int64_t> shape, ScalarType type) {
  return torch::stable::new_empty(like, shape, type);
}

// Call body with a value of the stored type of `tensor`, or refuse its dtype.
template <class... Types, class Body>
void with_stored_type(const Tensor& tensor, const char* name, Body body) {
  bool done = false;
  auto attempt = [&]<class X>(X zero) {
    if (done || tensor.scalar_type() != TypeOf<X>::type) return;
    body(zero);
    done = true;
  };
  (attempt(Types{}), ...);
  if (done) return;
  std::string names;
  ((names += std::string(names.empty() ? "" : ", ") + TypeOf<Types>::name), ...);
  refuse(name, " has dtype ", int(tensor.scalar_type()), " (torch's number): it must be one of ", names);
}

// Call body with the stored types of logits and of their gradient: the same, or 16 bits for the gradient of float32.
template <class... Types, class Body>
void with_gradient_types(const Tensor& logits, const Tensor& gradient, Body body) {
  if (gradient.dim() != 2 || gradient.size(0) != logits.size(0) || gradient.size(1) != logits.size(1)) {
    refuse("out has shape ", shape_of(gradient), ": a gradient of logits has theirs, ", shape_of(logits));
  }
  with_stored_type<Types...>(logits, "logits", [&]<class X>(X zero) {
    if (gradient.scalar_type() == logits.scalar_type()) {
      body(zero, zero);
    } else if constexpr (std::is_same_v<X, float>) {
      with_stored_type<BF16, F16>(gradient, "the gradient of float32 logits", [&]<class Y>(Y other) { body(zero, other); });
    } else {
      refuse(
          "out has dtype ", int(gradient.scalar_type()), " (torch's number) for ", TypeOf<X>::name,
          " logits: their gradient has their dtype, only that of float32 logits may have 16 bits");
    }
  });
}

// Bounds of sequences on the host: they rise from 0 to the number of tokens.
inline const int64_t* checked_bounds(const Tensor& cu_seqlens, int64_t tokens) {
  const int64_t sequences = cu_seqlens.numel() - 1;
  const int64_t* bounds = elements<int64_t>(cu_seqlens, "cu_seqlens", cu_seqlens.numel());
  for (int64_t i = 0; i <= sequences; i++) {
    const bool right = (i == 0 ? bounds[0] == 0 : bounds[i] >= bounds[i - 1]) && (i < sequences || bounds[i] == tokens);
    if (!right) refuse("cu_seqlens[", i, "] is ", bounds[i], ": it rises from 0 to the number of tokens, ", tokens);
  }
  return bounds;
}

// `[T, V_local]` logits whose rows may be strided; columns are adjacent.
struct Logits {
  int64_t rows, width, stride;

  explicit Logits(const Tensor& logits, int64_t columns) {
    if (logits.dim() != 2) refuse("logits has shape ", shape_of(logits), ": it must be [T, V]");
    rows = logits.size(0), width = logits.size(1), stride = logits.stride(0);
    if (width > 1 && logits.stride(1) != 1) {
      refuse("logits has column stride ", logits.stride(1), ": columns must be adjacent; pass logits.contiguous()");
    }
    if (columns < 0 || columns > width) refuse("columns is ", columns, ": logits has ", width, " of them");
  }
};

// One temperature for all rows, or one for each.
struct Temperature {
  double all;
  const float* each;

  Temperature(double temperature, const OptionalTensor& temperatures, int64_t rows)
      : all(temperature), each(elements_or_null<float>(temperatures, "temperatures", rows)) {}
};
