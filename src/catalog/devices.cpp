// Facts of GPUs by name, so that plans can be made and printed for devices that are not present.
// Called through DeviceInfo::by_name by `plait explain --device` and by planner tests.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>

#include "plait/device.hpp"
#include "plait/error.hpp"

namespace plait {
namespace {

struct Gpu {
  const char* name;
  int32_t compute_capability, multiprocessors;
  int64_t smem_per_block_bytes;  // opt-in maximum of one block (CUDA programming guide, compute capabilities)
};

constexpr int64_t kKib = 1024;
constexpr std::array<Gpu, 9> kGpus{{{"t4", 75, 40, 64 * kKib},
                                    {"a100", 80, 108, 163 * kKib},
                                    {"a10", 86, 72, 99 * kKib},
                                    {"rtx3090", 86, 82, 99 * kKib},
                                    {"l4", 89, 58, 99 * kKib},
                                    {"l40s", 89, 142, 99 * kKib},
                                    {"rtx4090", 89, 128, 99 * kKib},
                                    {"h100", 90, 132, 227 * kKib},
                                    {"h200", 90, 132, 227 * kKib}}};

}  // namespace

DeviceInfo DeviceInfo::by_name(std::string_view name) {
  if (name == "cpu") return host();
  for (const Gpu& gpu : kGpus) {
    if (name == gpu.name) {
      return {gpu.name, DeviceKind::kCuda, gpu.compute_capability, gpu.multiprocessors, gpu.smem_per_block_bytes, 1};
    }
  }
  throw Error(ErrorCode::kInvalidArgument, "device",
              fmt::format("got '{}', expected one of {}", name, fmt::join(known_names(), ", ")));
}

std::vector<std::string> DeviceInfo::known_names() {
  std::vector<std::string> names{"cpu"};
  for (const Gpu& gpu : kGpus) names.emplace_back(gpu.name);
  return names;
}

}  // namespace plait
