// What each backend supports, as plain data: dtypes, head dims, features, strategies.
// Called by the planner (core/plan.cpp), the tests and `plait doctor`; always built, for every backend.
#pragma once

#include <cstdint>
#include <span>

#include "plait/plan.hpp"
#include "plait/tensor.hpp"

namespace plait::catalog {

enum Feature : uint32_t {
  kCausalWindow = 1u << 0,
  kSoftcap = 1u << 1,
  kSinks = 1u << 2,
  kPacked = 1u << 3,
  kPseudoHeads = 1u << 4,  // joint and interleaved
  kOutFloat32 = 1u << 5,   // fp32 output from fp16 or bf16 inputs
  kDeterministic = 1u << 6,
  kFixedSplit = 1u << 7,  // batch-invariant split_kv with a given split_size
  kKvCache = 1u << 8,     // keys from a dense cache of ragged lengths, appended in place
  kPaged = 1u << 9,       // ... from pages of any size
};
const char* feature_name(Feature feature);

constexpr uint32_t bit(DType dtype) { return 1u << static_cast<uint32_t>(dtype); }
constexpr uint32_t bit(Strategy strategy) { return 1u << static_cast<uint32_t>(strategy); }

// One implementation of one op. `strategies` 0: the op has none and refuses every explicit one.
struct Support {
  Backend backend;
  Op op;
  DeviceKind device;
  int32_t min_compute_capability;
  uint32_t dtypes;      // bit(DType)
  uint32_t features;    // Feature
  uint32_t strategies;  // bit(Strategy)
  int64_t max_head_dim;
  int64_t head_dim_multiple;
};

// Every implementation of this build, in the order in which kAuto tries them (reference last, never chosen by kAuto).
std::span<const Support> supports();

// Tiles of the CPU backend.
inline constexpr int64_t kCpuTileM = 64;
inline constexpr int64_t kCpuTileN = 128;
inline constexpr int64_t kMaxHeadDim = 1024;
inline constexpr int64_t kWorkspaceAlignBytes = 64;

}  // namespace plait::catalog
