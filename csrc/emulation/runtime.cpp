// What the host side of the kernels calls in place of NVIDIA's runtime. nvcc's own host code registers each kernel under the
// name that its PTX has, and launches it with its grid, block and arguments; here the launch runs the translated PTX before
// it returns. A launch that fails is an error as on a device, and cudaGetErrorString gives the Fault's text.
#include <cuda_runtime_api.h>

#include <map>

#include "machine.h"

namespace {

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> of_host_functions;
  return of_host_functions;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
Configuration configured;
cudaError_t last_error = cudaSuccess;
std::string last_text;

constexpr int MULTIPROCESSORS = 132, MAJOR = 9, MINOR = 0;  // of the device that the PTX was made for

Dimensions from(const dim3& given) { return {given.x, given.y, given.z}; }

cudaError_t launch(const void* name, dim3 grid, dim3 block, dim3 cluster, void** arguments, size_t shared) {
  const Kernel* kernel = kernel_named(static_cast<const char*>(name));
  try {
    if (!kernel) throw Fault(std::string(static_cast<const char*>(name)) + " is not among the translated kernels");
    run({kernel, from(grid), from(block), from(cluster), reinterpret_cast<char* const*>(arguments), u32(shared)});
    return cudaSuccess;
  } catch (const Fault& error) {
    last_text = error.what();
    return last_error = cudaErrorLaunchFailure;
  }
}

const char* name_of(const void* host_function) {
  const auto found = names().find(host_function);
  return found == names().end() ? "a function that was not registered" : found->second.c_str();
}

}  // namespace

extern "C" {

// ---- what nvcc's generated code calls; a cudaKernel_t is the kernel's name

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  names()[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configured = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid, *block = configured.block, *shared = configured.shared;
  *static_cast<cudaStream_t*>(stream) = configured.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<char*>(name_of(host)));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launch(kernel, grid, block, {1, 1, 1}, arguments, shared);
}

// ---- what csrc/kernels and csrc/cuda call

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* given, const void* host, void** arguments) {
  dim3 cluster = {1, 1, 1};
  for (unsigned i = 0; i < given->numAttrs; i++) {
    const cudaLaunchAttribute& attribute = given->attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& size = attribute.val.clusterDim;
    cluster = {size.x, size.y, size.z};
  }
  return launch(name_of(host), given->gridDim, given->blockDim, cluster, arguments, given->dynamicSmemBytes);
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : last_text.c_str(); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  emulation_mark_written(memory);  // the whole tensor: memory is told by the tensor
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) *value = MULTIPROCESSORS;
  else if (attribute == cudaDevAttrComputeCapabilityMajor) *value = MAJOR;
  else if (attribute == cudaDevAttrComputeCapabilityMinor) *value = MINOR;
  else {
    last_text = "device attribute " + std::to_string(attribute) + " is not emulated: csrc/emulation/runtime.cpp";
    return last_error = cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
}
