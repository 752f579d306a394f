// Every CUDA call is checked here; a failure becomes a plait::Error that names the call and CUDA's own text.
// Called by all host code under src/cuda.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "plait/error.hpp"

namespace plait::cuda {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kDevice, "device",
              std::string(call) + " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                  "); a GPU, or a driver for CUDA 13 (580 or newer), is missing, or an earlier launch failed: "
                  "`plait doctor` tells what is there");
}

// Makes the tensors' device current for a call and restores the caller's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : wanted_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != wanted_) check(cudaSetDevice(wanted_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != wanted_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, wanted_;
};

}  // namespace plait::cuda
