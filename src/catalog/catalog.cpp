// The support table of this build.
// Called by the planner, `plait doctor` and the tests.
#include "catalog/catalog.hpp"

#include <algorithm>
#include <array>

namespace plait::catalog {
namespace {

constexpr uint32_t kFloats = bit(DType::kFloat16) | bit(DType::kBFloat16) | bit(DType::kFloat32);
constexpr uint32_t kFloatsAnd64 = kFloats | bit(DType::kFloat64);
constexpr uint32_t kWholeContract =
    kCausalWindow | kSoftcap | kSinks | kPacked | kPseudoHeads | kOutFloat32 | kDeterministic;
constexpr uint32_t kCacheContract = (kWholeContract & ~kPacked) | kKvCache | kPaged;

constexpr uint32_t kMmaFloat16Bit = kMmaFloat16 ? bit(DType::kFloat16) : 0u;
constexpr uint32_t kMmaDtypes = kMmaFloat16Bit | (kMmaBFloat16 ? bit(DType::kBFloat16) : 0u);
constexpr uint32_t kMixFeatures = kPacked | kDeterministic;

constexpr Support row(Backend backend, Op op, uint32_t dtypes, uint32_t features, uint32_t strategies) {
  return {backend, op, DeviceKind::kCpu, 0, dtypes, features, strategies, kMaxHeadDim, 1};
}

constexpr Support naive_row(Op op, uint32_t features, uint32_t strategies) {
  return {Backend::kCudaNaive, op, DeviceKind::kCuda, kTuring, kFloats, features, strategies, kMaxHeadDim, 1};
}

constexpr Support mma_attention(Op op, int32_t capability, uint32_t dtypes, uint32_t strategies) {
  return {Backend::kCudaMma, op,         DeviceKind::kCuda, capability,         dtypes,
          kWholeContract,    strategies, kMmaMaxHeadDim,    kMmaHeadDimMultiple};
}

// Few query rows over ranges of keys, also those of a cache (raw IHA caches go to cuda_naive).
constexpr Support mma_decode(Op op, int32_t capability, uint32_t dtypes) {
  const uint32_t features = op == Op::kKvCacheForward ? kCacheContract : kWholeContract & ~kPacked;
  return {Backend::kCudaMma,
          op,
          DeviceKind::kCuda,
          capability,
          dtypes,
          features | kFixedSplit,
          bit(Strategy::kSplitKv),
          kMmaMaxHeadDim,
          kMmaHeadDimMultiple};
}

// Many query rows beside the keys of a dense cache.
constexpr Support mma_cache_prefill(int32_t capability, uint32_t dtypes) {
  Support support = mma_attention(Op::kKvCacheForward, capability, dtypes, bit(Strategy::kSplitQ));
  support.features = kCacheContract & ~kPaged;
  return support;
}

constexpr Support mma_split_d(Op op, int32_t capability, uint32_t dtypes, uint32_t strategies) {
  Support support = mma_attention(op, capability, dtypes, strategies);
  support.max_head_dim = kMaxHeadDim;
  support.min_head_dim = kMmaSplitDMinHeadDim;
  return support;
}

// Ranges of keys by split_d.
constexpr Support mma_split_d_ranges(Op op, int32_t capability, uint32_t dtypes) {
  Support support = mma_decode(op, capability, dtypes);
  support.features &= ~uint32_t{kPaged};
  support.max_head_dim = kMaxHeadDim;
  support.min_head_dim = kMmaSplitDMinHeadDim;
  return support;
}

constexpr Support mma_mix(Op op, int32_t capability, uint32_t dtypes) {
  return {Backend::kCudaMma, op, DeviceKind::kCuda, capability,          dtypes,
          kMixFeatures,      0,  kMaxHeadDim,       kMmaHeadDimMultiple, kMmaMaxMixedHeads,
          kMmaMaxPseudoHeads};
}

// Hopper's prefill, also beside a dense cache.
constexpr Support sm90_forward(Op op) {
  Support support = mma_attention(op, kHopper, kMmaDtypes, bit(Strategy::kSplitQ));
  if (op == Op::kKvCacheForward) support.features = kCacheContract & ~kPaged;
  support.backend = Backend::kCudaSm90;
  support.max_head_dim = kSm90HeadDims.back();
  support.max_compute_capability = kHopper;
  return support;
}

// Its row tiles over ranges of keys.
constexpr Support sm90_ranges(Op op) {
  Support support = sm90_forward(op);
  support.features = (support.features & ~uint32_t{kPacked}) | kFixedSplit;
  support.strategies = bit(Strategy::kSplitKv);
  return support;
}

constexpr std::array kSupports{
    sm90_forward(Op::kAttentionForward),  // first: supports() leaves these out of a build without cuda_sm90
    sm90_forward(Op::kKvCacheForward),
    sm90_ranges(Op::kAttentionForward),
    sm90_ranges(Op::kKvCacheForward),
    row(Backend::kCpu, Op::kAttentionForward, kFloats, kWholeContract | kFixedSplit,
        bit(Strategy::kSplitQ) | bit(Strategy::kSplitKv)),
    row(Backend::kCpu, Op::kAttentionBackward, kFloats, kWholeContract, 0),
    row(Backend::kCpu, Op::kPremixForward, kFloats, kMixFeatures, 0),
    row(Backend::kCpu, Op::kPremixBackward, kFloats, kMixFeatures, 0),
    row(Backend::kCpu, Op::kCollapseForward, kFloats, kMixFeatures, 0),
    row(Backend::kCpu, Op::kCollapseBackward, kFloats, kMixFeatures, 0),
    row(Backend::kCpu, Op::kKvCacheForward, kFloats, kCacheContract | kFixedSplit,
        bit(Strategy::kSplitQ) | bit(Strategy::kSplitKv)),
    mma_attention(Op::kAttentionForward, kAmpere, kMmaDtypes, bit(Strategy::kSplitQ)),
    mma_split_d(Op::kAttentionForward, kAmpere, kMmaDtypes, bit(Strategy::kSplitD)),
    mma_attention(Op::kAttentionForward, kTuring, kMmaFloat16Bit, bit(Strategy::kSplitQ)),
    mma_split_d(Op::kAttentionForward, kTuring, kMmaFloat16Bit, bit(Strategy::kSplitD)),
    mma_decode(Op::kAttentionForward, kAmpere, kMmaDtypes),
    mma_decode(Op::kAttentionForward, kTuring, kMmaFloat16Bit),
    mma_split_d_ranges(Op::kAttentionForward, kAmpere, kMmaDtypes),
    mma_split_d_ranges(Op::kAttentionForward, kTuring, kMmaFloat16Bit),
    mma_attention(Op::kAttentionBackward, kAmpere, kMmaDtypes, 0),
    mma_split_d(Op::kAttentionBackward, kAmpere, kMmaDtypes, 0),
    mma_attention(Op::kAttentionBackward, kTuring, kMmaFloat16Bit, 0),
    mma_split_d(Op::kAttentionBackward, kTuring, kMmaFloat16Bit, 0),
    mma_mix(Op::kPremixForward, kAmpere, kMmaDtypes),
    mma_mix(Op::kPremixForward, kTuring, kMmaFloat16Bit),
    mma_mix(Op::kPremixBackward, kAmpere, kMmaDtypes),
    mma_mix(Op::kPremixBackward, kTuring, kMmaFloat16Bit),
    mma_mix(Op::kCollapseForward, kAmpere, kMmaDtypes),
    mma_mix(Op::kCollapseForward, kTuring, kMmaFloat16Bit),
    mma_mix(Op::kCollapseBackward, kAmpere, kMmaDtypes),
    mma_mix(Op::kCollapseBackward, kTuring, kMmaFloat16Bit),
    mma_decode(Op::kKvCacheForward, kAmpere, kMmaDtypes),
    mma_decode(Op::kKvCacheForward, kTuring, kMmaFloat16Bit),
    mma_cache_prefill(kAmpere, kMmaDtypes),
    mma_cache_prefill(kTuring, kMmaFloat16Bit),
    mma_split_d_ranges(Op::kKvCacheForward, kAmpere, kMmaDtypes),
    mma_split_d_ranges(Op::kKvCacheForward, kTuring, kMmaFloat16Bit),
    naive_row(Op::kAttentionForward, kWholeContract, bit(Strategy::kSplitQ)),
    naive_row(Op::kAttentionBackward, kWholeContract, 0),
    naive_row(Op::kPremixForward, kMixFeatures, 0),
    naive_row(Op::kPremixBackward, kMixFeatures, 0),
    naive_row(Op::kCollapseForward, kMixFeatures, 0),
    naive_row(Op::kCollapseBackward, kMixFeatures, 0),
    naive_row(Op::kKvCacheForward, kCacheContract, bit(Strategy::kSplitQ)),
    row(Backend::kReference, Op::kAttentionForward, kFloatsAnd64, kWholeContract, 0),
    row(Backend::kReference, Op::kAttentionBackward, kFloatsAnd64, kWholeContract, 0),
    row(Backend::kReference, Op::kPremixForward, kFloatsAnd64, kMixFeatures, 0),
    row(Backend::kReference, Op::kPremixBackward, kFloatsAnd64, kMixFeatures, 0),
    row(Backend::kReference, Op::kCollapseForward, kFloatsAnd64, kMixFeatures, 0),
    row(Backend::kReference, Op::kCollapseBackward, kFloatsAnd64, kMixFeatures, 0),
    row(Backend::kReference, Op::kKvCacheForward, kFloatsAnd64, kCacheContract, 0),
};

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

std::span<const Support> supports() {
  constexpr auto kSm90Rows = std::ranges::count(kSupports, Backend::kCudaSm90, &Support::backend);
  return std::span(kSupports).subspan(kSm90 ? 0 : kSm90Rows);
}

}  // namespace plait::catalog
