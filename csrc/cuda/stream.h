// The device and stream that a launch goes to. Under EMULATED there is neither.
#pragma once

#include "../tensors.h"

#ifdef EMULATED

struct OnDeviceOf {
  cudaStream_t stream = nullptr;
  explicit OnDeviceOf(const Tensor&) {}
};

#else

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

// Makes the tensor's device current until the end of the scope.
struct OnDeviceOf {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit OnDeviceOf(const Tensor& tensor) : guard(tensor.get_device_index()), stream(nullptr) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
  }
};

#endif
