// A CUDA device for a machine that has none: its memory is the host's, its allocations are what the machine lets kernels touch,
// and what torch itself computes on its tensors is computed by torch's CPU operators in place. So tests/gpu run unchanged.
// Loaded before torch, whose autograd asks once, at import, which devices there are.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <set>
#include <string>

extern "C" {
void emulation_add_memory(void* begin, size_t bytes, bool written);
void emulation_remove_memory(void* begin);
void emulation_mark_written(void* anywhere_in_it);
}

namespace {

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Preferred to those of a torch with CUDA, whose guard, allocator and operators are replaced too: it is there first.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks)

// ---- memory

const c10::Device DEVICE(c10::kCUDA, 0);
constexpr size_t ALIGNMENT = 512, GAP = 512;  // the gap keeps two tensors from being one range

void release(void* memory) {
  emulation_remove_memory(memory);
  free(memory);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, DEVICE};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, ALIGNMENT, bytes + GAP) == 0, "the host has no ", bytes, " bytes left");
    emulation_add_memory(memory, bytes, false);
    return {memory, memory, &release, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} device_memory;
REGISTER_ALLOCATOR(c10::kCUDA, &device_memory)

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, KEYS, c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> type,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory, KEYS,
      c10::dtype_or_default(type));
}

// ---- the same memory as a tensor of the host

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(c10::kCPU).requires_grad(false));
}

void mark_written(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda() && tensor.storage().nbytes()) {
    emulation_mark_written(tensor.storage().mutable_data());
  }
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(to).copy_(on_host(from));
  mark_written(to);
  return to;
}

at::Tensor on_device(const at::Tensor& tensor) {
  at::Tensor made = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &device_memory, KEYS, tensor.scalar_type());
  if (tensor.numel()) copy(made, tensor, false);
  return made;
}

// An empty result that an operator is to size: the host sizes one of its own, whose values and shape become the device's.
bool is_to_be_sized(const c10::IValue& value, const c10::AliasInfo* alias) {
  return alias && alias->isWrite() && value.isTensor() && value.toTensor().is_cuda() && value.toTensor().numel() == 0;
}

void adopt(const at::Tensor& to, const at::Tensor& from) {
  const at::Tensor made = on_device(from);
  to.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  to.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
}

// Any operator of torch: with its tensors as the host's, by its CPU kernel. What it changes it changes in place, and what
// it makes is copied to the device.
void by_the_host(const c10::OperatorHandle& operation, c10::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  std::vector<c10::IValue> given(stack->begin() + long(begin), stack->end());
  std::vector<at::Tensor> sized(given.size());
  for (size_t i = begin; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (is_to_be_sized(value, schema.arguments()[i - begin].alias_info())) {
      const at::Tensor& result = value.toTensor();
      value = sized[i - begin] = at::empty(result.sizes(), result.options().device(c10::kCPU));
    } else if (value.isTensor()) value = on_host(value.toTensor());
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = on_host(tensor);
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional(on_host(*tensor)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) value = c10::Device(c10::kCPU);
  }
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < given.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (sized[i].defined()) adopt(given[i].toTensor(), sized[i]);
    else if (alias && alias->isWrite() && given[i].isTensor()) mark_written(given[i].toTensor());
  }
  for (size_t i = 0; i < schema.returns().size(); i++) {
    c10::IValue& value = (*stack)[results + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {  // the argument that it changed
      for (size_t k = 0; k < given.size(); k++) {
        const auto* other = schema.arguments()[k].alias_info();
        if (other && *other == *alias) value = given[k];
      }
    } else if (value.isTensor()) value = on_device(value.toTensor());
    else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = on_device(tensor);
      value = list;
    }
  }
}

// Products of 16-bit matrices with a float32 result, which torch's CPU does not have.
at::Tensor mm(const at::Tensor& a, const at::Tensor& b, at::ScalarType type) {
  return on_device(at::mm(on_host(a).to(type), on_host(b).to(type)));
}
at::Tensor& mm_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType type, at::Tensor& out) {
  return copy(out, at::mm(on_host(a).to(type), on_host(b).to(type)), false);
}
at::Tensor addmm(
    const at::Tensor& to, const at::Tensor& a, const at::Tensor& b, at::ScalarType type, const at::Scalar& beta,
    const at::Scalar& alpha) {
  return on_device(at::addmm(on_host(to).to(type), on_host(a).to(type), on_host(b).to(type), beta, alpha));
}
at::Tensor& addmm_out(
    const at::Tensor& to, const at::Tensor& a, const at::Tensor& b, at::ScalarType type, const at::Scalar& beta,
    const at::Scalar& alpha, at::Tensor& out) {
  return copy(out, at::addmm(on_host(to).to(type), on_host(a).to(type), on_host(b).to(type), beta, alpha), false);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("mm.dtype", &mm);
  library.impl("mm.dtype_out", &mm_out);
  library.impl("addmm.dtype", &addmm);
  library.impl("addmm.dtype_out", &addmm_out);
}
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_host>()); }

// A fallback is asked where no kernel is: those of a torch with CUDA are replaced one by one, but for the above.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  const std::set<std::string> own{"empty.memory_format", "empty_strided", "copy_", "as_strided", "view",
      "_reshape_alias", "mm.dtype", "mm.dtype_out", "addmm.dtype", "addmm.dtype_out"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto operation = dispatcher.findOp(name);
    const std::string full = toString(name).substr(sizeof("aten::") - 1);
    if (name.getNamespace() == "aten" && !own.count(full) &&
        operation->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_the_host>());
    }
  }
}

// The one stream of the device, for csrc/cuda/stream.h.
extern "C" int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
