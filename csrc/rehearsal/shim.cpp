// Tells torch that a CUDA device is there, for `megatron-rl rehearse`, which runs the engine's CUDA path
// on fake tensors. Loaded before torch, whose autograd asks once, at import. Nothing here computes or holds memory:
// fake tensors never reach a kernel, and an operator that is called on a real CUDA tensor has none and raises.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

constexpr c10::DeviceIndex kDevices = 16;  // more than any node has: a rank takes the one of its LOCAL_RANK

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->getDevice().index();
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Preferred to those of a torch with CUDA, and its guard replaced: it is linked to libtorch_cuda, which is there first.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace
