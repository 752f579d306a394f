// GpuMemory of a build without CUDA: DeviceInfo::cuda refuses such a device before any of this is reached.
// Compiled by CMakeLists.txt when PLAIT_CUDA is off.
#include "gpu.hpp"
#include "plait/device.hpp"

namespace plait::cli {

GpuMemory::GpuMemory(int32_t index) : index_(DeviceInfo::cuda(index).kind == DeviceKind::kCuda ? index : -1) {}
GpuMemory::~GpuMemory() = default;
void* GpuMemory::allocate(int64_t /*bytes*/) { return nullptr; }
void GpuMemory::upload(void* /*device*/, const void* /*host*/, int64_t /*bytes*/) const {}
void GpuMemory::download(void* /*host*/, const void* /*device*/, int64_t /*bytes*/) const {}
double GpuMemory::time_ms(const std::function<void()>& /*body*/) const { return 0; }

}  // namespace plait::cli
