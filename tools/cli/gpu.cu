// Device memory and timing for check and bench.
// Called through gpu.hpp.
#include <cuda_runtime_api.h>

#include <string>

#include "gpu.hpp"
#include "plait/error.hpp"

namespace plait::cli {
namespace {

void checked(cudaError_t status, const char* call) {
  if (status != cudaSuccess)
    throw Error(ErrorCode::kDevice, "device", std::string(call) + " failed: " + cudaGetErrorString(status));
}

}  // namespace

GpuMemory::GpuMemory(int32_t index) : index_(index) { checked(cudaSetDevice(index), "cudaSetDevice"); }

GpuMemory::~GpuMemory() {
  for (void* block : blocks_) cudaFree(block);
}

void* GpuMemory::allocate(int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* block = nullptr;
  checked(cudaMalloc(&block, static_cast<size_t>(bytes)), "cudaMalloc");
  blocks_.push_back(block);
  return block;
}

void GpuMemory::upload(void* device, const void* host, int64_t bytes) const {
  if (bytes > 0) checked(cudaMemcpy(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice), "cudaMemcpy");
}

void GpuMemory::download(void* host, const void* device, int64_t bytes) const {
  if (bytes > 0) checked(cudaMemcpy(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost), "cudaMemcpy");
}

double GpuMemory::time_ms(const std::function<void()>& body) const {
  cudaEvent_t begin = nullptr, end = nullptr;
  checked(cudaEventCreate(&begin), "cudaEventCreate");
  checked(cudaEventCreate(&end), "cudaEventCreate");
  checked(cudaEventRecord(begin), "cudaEventRecord");
  body();
  checked(cudaEventRecord(end), "cudaEventRecord");
  checked(cudaEventSynchronize(end), "cudaEventSynchronize");
  float ms = 0;
  checked(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms;
}

}  // namespace plait::cli
