// What this build and this machine have: GPUs, and which backends were compiled in.
// Called by bindings, the CLI and C++ users.
#include "plait/device.hpp"

#include <charconv>
#include <string>

#include "catalog/catalog.hpp"
#include "cuda/cuda.hpp"
#include "plait/error.hpp"
#include "plait/plan.hpp"

namespace plait {

DeviceInfo DeviceInfo::cuda(int32_t index) { return plait::cuda::device_info(index); }

int32_t DeviceInfo::cuda_count() noexcept { return plait::cuda::device_count(); }

DeviceInfo DeviceInfo::named(std::string_view name) {
  constexpr std::string_view kCuda = "cuda", kCudaIndex = "cuda:";
  if (name == kCuda) return cuda(0);
  if (name.substr(0, kCudaIndex.size()) != kCudaIndex) return by_name(name);
  int32_t index = 0;
  const char* const end = name.data() + name.size();
  const auto [stopped, problem] = std::from_chars(name.data() + kCudaIndex.size(), end, index);
  if (problem != std::errc{} || stopped != end || index < 0) {
    throw Error(ErrorCode::kInvalidArgument, "device",
                "got '" + std::string(name) + "', expected cuda or cuda:N with the number of a GPU");
  }
  return cuda(index);
}

bool backend_is_built(Backend backend) {
  switch (backend) {
    case Backend::kAuto:
    case Backend::kReference:
    case Backend::kCpu:
      return true;
    case Backend::kCudaNaive:
    case Backend::kCudaMma:
      return cuda::built();
    case Backend::kCudaSm90:
      return cuda::built() && catalog::kSm90;
  }
  return false;
}

}  // namespace plait
