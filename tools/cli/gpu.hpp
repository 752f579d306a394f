// Device memory and timing for check and bench.
// Called by run_attention.cpp. A build without CUDA has gpu_absent.cpp in place of gpu.cu.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace plait::cli {

// Memory of one GPU of this machine, freed together. Every function throws plait::Error when CUDA refuses a call.
class GpuMemory {
 public:
  explicit GpuMemory(int32_t index);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  int32_t index() const { return index_; }
  void* allocate(int64_t bytes);  // freed with the GpuMemory; null for 0 bytes
  void upload(void* device, const void* host, int64_t bytes) const;
  void download(void* host, const void* device, int64_t bytes) const;  // after all launched work
  double time_ms(const std::function<void()>& body) const;             // between two events on the default stream

 private:
  int32_t index_;
  std::vector<void*> blocks_;
};

}  // namespace plait::cli
