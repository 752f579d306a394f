// What will run and why: the planner's answer, a printable value.
// Called by user code between plan_*() and the run functions, and by `plait explain`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/device.hpp"

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

enum class Backend : int32_t { kAuto, kReference, kCpu, kCudaNaive, kCudaMma, kCudaSm90 };
enum class Strategy : int32_t {
  kAuto,
  kSplitQ,   // parallel over query tiles
  kSplitKv,  // parallel over key ranges, then an LSE-weighted combine
  kSplitD,   // head dim partitioned, 256 < D <= 1024
};

enum class Op : int32_t {
  kAttentionForward,
  kAttentionBackward,
  kPremixForward,
  kPremixBackward,
  kCollapseForward,
  kCollapseBackward,
  kKvCacheForward,
};

const char* backend_name(Backend backend);     // "cpu"
const char* strategy_name(Strategy strategy);  // "split_q"
const char* op_name(Op op);                    // "attention_forward"
Backend parse_backend(std::string_view name);  // throws Error("backend") listing the names
Strategy parse_strategy(std::string_view name);
// Whether this build has its kernels. A plan can be made for a backend that is not built, to be read.
bool backend_is_built(Backend backend);

// Same problem, device and build give the same plan. Valid for every call with the same shapes, dtypes, strides-free
// options; a run function refuses a plan that was made for another problem.
struct Plan {
  Op op = Op::kAttentionForward;
  Backend backend = Backend::kAuto;     // never kAuto in a finished plan
  Strategy strategy = Strategy::kAuto;  // kAuto where the op has no strategies (reference, premix, collapse)
  DeviceInfo device;
  int64_t tile_m = 0;      // query rows per tile
  int64_t tile_n = 0;      // keys per tile
  int64_t splits = 1;      // key ranges per sequence (split_kv)
  int64_t split_size = 0;  // keys per range (split_kv)
  int32_t workers = 1;     // executor workers the run uses
  int64_t workspace_bytes = 0;
  uint64_t fingerprint = 0;          // of the problem it was made for
  std::vector<std::string> reasons;  // why this backend, this strategy, these numbers

  std::string explain() const;  // several lines, ends with a newline
};

}  // namespace plait
#pragma GCC visibility pop
