// The host as a device, and the plain thread executor.
// Called by user code that brings no executor of its own: the CLI, the tests, C++ examples.
#include "plait/device.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace plait {
namespace {

int32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

void run_threads(void*, int32_t workers, void (*body)(void*, int32_t), void* arg) {
  std::vector<std::jthread> others;
  others.reserve(static_cast<size_t>(std::max(0, workers - 1)));
  for (int32_t worker = 1; worker < workers; ++worker) others.emplace_back(body, arg, worker);
  if (workers > 0) body(arg, 0);
}

}  // namespace

DeviceInfo DeviceInfo::host(int32_t workers) {
  DeviceInfo info;
  info.workers = workers > 0 ? workers : usable_cores();
  return info;
}

Executor Executor::threads() { return {run_threads, nullptr}; }

}  // namespace plait
