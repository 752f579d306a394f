// The host as a device, and the plain thread executor.
// Called by user code that brings no executor of its own: the CLI, the tests, C++ examples.
#include "plait/device.hpp"

#include <sched.h>

#include <algorithm>
#include <exception>
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
  int32_t started = 1;  // worker 0 is the calling thread
  try {
    others.reserve(static_cast<size_t>(std::max(0, workers - 1)));
    for (; started < workers; ++started) others.emplace_back(body, arg, started);
  } catch (const std::exception&) {
    // No more threads or memory: the calling thread takes the rest, one after the other.
  }
  if (workers > 0) body(arg, 0);
  for (; started < workers; ++started) body(arg, started);
}

}  // namespace

DeviceInfo DeviceInfo::host(int32_t workers) {
  DeviceInfo info;
  info.workers = workers > 0 ? workers : usable_cores();
  return info;
}

Executor Executor::threads() { return {run_threads, nullptr, nullptr}; }

}  // namespace plait
