// The support table of this build.
// Called by the planner, `plait doctor` and the tests.
#include "catalog/catalog.hpp"

#include <array>

namespace plait::catalog {
namespace {

constexpr uint32_t kFloats = bit(DType::kFloat16) | bit(DType::kBFloat16) | bit(DType::kFloat32);
constexpr uint32_t kFloatsAnd64 = kFloats | bit(DType::kFloat64);
constexpr uint32_t kWholeContract =
    kCausalWindow | kSoftcap | kSinks | kPacked | kPseudoHeads | kOutFloat32 | kDeterministic;
constexpr uint32_t kCacheContract = (kWholeContract & ~kPacked) | kKvCache | kPaged;

constexpr Support row(Backend backend, Op op, uint32_t dtypes, uint32_t features, uint32_t strategies) {
  return {backend, op, DeviceKind::kCpu, 0, dtypes, features, strategies, kMaxHeadDim, 1};
}

constexpr std::array<Support, 14> kSupports{{
    row(Backend::kCpu, Op::kAttentionForward, kFloats, kWholeContract | kFixedSplit,
        bit(Strategy::kSplitQ) | bit(Strategy::kSplitKv)),
    row(Backend::kCpu, Op::kAttentionBackward, kFloats, kWholeContract, 0),
    row(Backend::kCpu, Op::kPremixForward, kFloats, kPacked | kDeterministic, 0),
    row(Backend::kCpu, Op::kPremixBackward, kFloats, kPacked | kDeterministic, 0),
    row(Backend::kCpu, Op::kCollapseForward, kFloats, kPacked | kDeterministic, 0),
    row(Backend::kCpu, Op::kCollapseBackward, kFloats, kPacked | kDeterministic, 0),
    row(Backend::kCpu, Op::kKvCacheForward, kFloats, kCacheContract | kFixedSplit,
        bit(Strategy::kSplitQ) | bit(Strategy::kSplitKv)),
    row(Backend::kReference, Op::kAttentionForward, kFloatsAnd64, kWholeContract, 0),
    row(Backend::kReference, Op::kAttentionBackward, kFloatsAnd64, kWholeContract, 0),
    row(Backend::kReference, Op::kPremixForward, kFloatsAnd64, kPacked | kDeterministic, 0),
    row(Backend::kReference, Op::kPremixBackward, kFloatsAnd64, kPacked | kDeterministic, 0),
    row(Backend::kReference, Op::kCollapseForward, kFloatsAnd64, kPacked | kDeterministic, 0),
    row(Backend::kReference, Op::kCollapseBackward, kFloatsAnd64, kPacked | kDeterministic, 0),
    row(Backend::kReference, Op::kKvCacheForward, kFloatsAnd64, kCacheContract, 0),
}};

}  // namespace

const char* feature_name(Feature feature) {
  switch (feature) {
    case kCausalWindow:
      return "causal and window";
    case kSoftcap:
      return "softcap";
    case kSinks:
      return "sinks";
    case kPacked:
      return "packed sequences";
    case kPseudoHeads:
      return "pseudo-heads";
    case kOutFloat32:
      return "out_dtype float32";
    case kDeterministic:
      return "deterministic";
    case kFixedSplit:
      return "split_size";
    case kKvCache:
      return "key/value cache";
    case kPaged:
      return "paged cache";
  }
  return "?";
}

std::span<const Support> supports() { return kSupports; }

}  // namespace plait::catalog
