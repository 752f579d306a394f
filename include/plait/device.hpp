// What the planner knows of a machine, and how a call gets its threads (CPU) or its stream (CUDA).
// Called by user code (DeviceInfo::host, DeviceInfo::cuda, Executor) and by plan(), which never touches a device
// itself.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/tensor.hpp"

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

// Facts of one device, as values: the planner also plans for devices that are not present.
struct DeviceInfo {
  std::string name = "cpu";
  DeviceKind kind = DeviceKind::kCpu;
  int32_t compute_capability = 0;  // 90 for sm_90; 0 on a CPU
  int32_t multiprocessors = 0;     // streaming multiprocessors; 0 on a CPU
  int64_t smem_per_block_bytes = 0;
  int32_t workers = 1;  // CPU: threads the executor will run at once, at least 1

  // The CPU of this machine with `workers` threads (0: all cores the process may use).
  static DeviceInfo host(int32_t workers = 0);
  // The GPU that CUDA numbers `index`. Throws Error("device"): kUnsupported in a build without CUDA or for a GPU older
  // than compute capability 7.5, kDevice when there is no such GPU or no driver for CUDA 13 (580 or newer).
  static DeviceInfo cuda(int32_t index = 0);
  // GPUs that DeviceInfo::cuda can name; 0 without a GPU, a driver or CUDA in the build. Never throws.
  static int32_t cuda_count() noexcept;
  // A device by catalog name ("cpu", "h200", "a100", "l4", "t4", ...). Throws Error("device") listing the names.
  static DeviceInfo by_name(std::string_view name);
  static std::vector<std::string> known_names();
  // As by_name, and "cuda" or "cuda:1" for a GPU of this machine.
  static DeviceInfo named(std::string_view name);
};

// CPU: runs `body(arg, worker)` once for every worker in [0, workers), in parallel if it can, and returns when all are
// done. A body never throws. Results never depend on the number of workers or on their order.
// CUDA: kernels are launched on `stream` of the tensors' device, and the call returns without waiting for them.
struct Executor {
  void (*run)(void* context, int32_t workers, void (*body)(void* arg, int32_t worker), void* arg) = nullptr;
  void* context = nullptr;
  void* stream = nullptr;  // a cudaStream_t; null: the default stream

  // Plain std::thread workers, started and joined per call.
  static Executor threads();
  // For calls on CUDA tensors: no threads.
  static Executor on_stream(void* stream) { return {nullptr, nullptr, stream}; }
};

}  // namespace plait
#pragma GCC visibility pop
