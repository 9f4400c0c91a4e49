// The device and stream that a launch goes to.
#pragma once

#include "../tensors.h"

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/headeronly/util/shim_utils.h>

struct Named {
  const char* name;
  const Tensor* tensor;

  Named(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  Named(const char* name, const OptionalTensor& tensor) : name(name), tensor(tensor ? &*tensor : nullptr) {}
};

// A kernel that reads another device's memory ends its process with an illegal address, some calls later.
inline void check_devices(const Named& first, std::initializer_list<Named> others) {
  auto text = [](const Tensor& tensor) {
    std::string type = tensor.is_cpu() ? "the CPU" : tensor.is_cuda() ? "CUDA device " : "another device";
    return tensor.is_cuda() ? type + std::to_string(tensor.get_device_index()) : type;
  };
  for (const Named& other : others) {
    if (other.tensor && other.tensor->device() != first.tensor->device()) {
      refuse(
          other.name, " is on ", text(*other.tensor), " and ", first.name, " on ", text(*first.tensor),
          ": both must be on one device; pass ", other.name, ".to(", first.name, ".device)");
    }
  }
}

// Makes the first tensor's device current until the end of the scope; the others must be there too.
struct OnDeviceOf {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  OnDeviceOf(const Named& first, std::initializer_list<Named> others)
      : guard(first.tensor->get_device_index()), stream(nullptr) {
    check_devices(first, others);
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(first.tensor->get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};
