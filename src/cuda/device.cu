// The GPUs of this machine as DeviceInfo.
// Called through DeviceInfo::cuda by bindings and users.
#include <cuda_runtime_api.h>

#include <string>

#include "catalog/catalog.hpp"
#include "cuda/cuda.hpp"
#include "cuda/runtime/check.hpp"

namespace plait::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

bool built() { return true; }

int32_t device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // else the next checked call would report it
    return 0;
  }
  return count;
}

DeviceInfo device_info(int32_t index) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (index < 0 || index >= count) {
    throw Error(ErrorCode::kDevice, "device",
                "got cuda:" + std::to_string(index) + ", this machine has " + std::to_string(count) + " GPU(s)");
  }
  DeviceInfo info;
  info.name = "cuda:" + std::to_string(index);
  info.kind = DeviceKind::kCuda;
  info.compute_capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, index) + attribute(cudaDevAttrComputeCapabilityMinor, index);
  info.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  info.smem_per_block_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  if (info.compute_capability < catalog::kTuring) {
    throw Error(ErrorCode::kUnsupported, "device",
                "got a GPU of compute capability " + std::to_string(info.compute_capability / 10) + "." +
                    std::to_string(info.compute_capability % 10) +
                    ", expected 7.5 (Turing) or newer; move the tensors to the CPU");
  }
  return info;
}

}  // namespace plait::cuda
