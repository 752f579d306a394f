// What each backend supports, as plain data: dtypes, head dims, features, strategies.
// Called by the planner (core/plan.cpp), the tests and `plait doctor`; always built, for every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "catalog/built_variants.hpp"
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
  int64_t max_mixed_heads = 0;  // premix and collapse: source heads, and pseudo-heads; 0: any number
  int64_t max_pseudo_heads = 0;
  int64_t min_head_dim = 1;            // of the larger of the two
  int32_t max_compute_capability = 0;  // 0: none
};

// Every implementation that plait has, in the order in which kAuto tries them (reference last, never chosen by kAuto).
// Those of CUDA are here in a build without CUDA too, so that it can plan for a GPU elsewhere.
std::span<const Support> supports();

// Tiles of the CPU backend.
inline constexpr int64_t kCpuTileM = 64;
inline constexpr int64_t kCpuTileN = 128;
inline constexpr int64_t kMaxHeadDim = 1024;
// cuda_mma: head dims are multiples of kMmaHeadDimMultiple; the last bucket of its attention kernels is its limit.
inline constexpr int64_t kMmaHeadDimMultiple = 8;
inline constexpr int64_t kMmaMaxHeadDim = kMmaHeadDims.back();
// The bucket whose kernels serve a head dim, by zero fill; head_dim at most kMmaMaxHeadDim.
constexpr int head_dim_bucket(int64_t head_dim) {
  size_t index = 0;
  while (kMmaHeadDims[index] < head_dim) ++index;
  return kMmaHeadDims[index];
}
// Above the buckets cuda_mma's attention is split_d, if it is built: from kMmaSplitDMinHeadDim to kMaxHeadDim.
inline constexpr bool kMmaSplitD = kMmaMaxHeadDim == 256;
inline constexpr int64_t kMmaSplitDMinHeadDim = (kMmaSplitD ? kMmaMaxHeadDim : kMaxHeadDim) + kMmaHeadDimMultiple;
inline constexpr int64_t kMmaMaxMixedHeads = 64;
inline constexpr int64_t kMmaMaxPseudoHeads = 16;
// Turing has the tensor-core instructions for float16 only.
inline constexpr int32_t kTuring = 75;
inline constexpr int32_t kAmpere = 80;
// wgmma is Hopper's alone.
inline constexpr int32_t kHopper = 90;
inline constexpr std::array kSm90HeadDims{64, 128, 192, 256};
inline constexpr int64_t kWorkspaceAlignBytes = 64;

}  // namespace plait::catalog
