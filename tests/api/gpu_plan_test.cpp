// Plans of attention and cache calls for GPUs that are not here: backend, strategy, workspace, refusals.
#include <gtest/gtest.h>

#include <algorithm>

#include "catalog/catalog.hpp"
#include "plait/attention.hpp"
#include "plait/kv_cache.hpp"

namespace plait {
namespace {

constexpr int64_t kHeadDim = 128;

// A view that is planned with and never read.
TensorView on_gpu(DType dtype, std::initializer_list<int64_t> shape) {
  alignas(256) static char address;
  TensorView view = TensorView::contiguous(&address, dtype, shape);
  view.device = {DeviceKind::kCuda, 0};
  return view;
}

struct Sizes {
  int64_t batch = 1, heads_q = 32, heads_kv = 8, seqlen_q = 1, seqlen_kv = 8192;
  DType dtype = DType::kFloat16;
};

AttentionArgs attention(const Sizes& s) {
  AttentionArgs args;
  args.q = on_gpu(s.dtype, {s.batch, s.heads_q, s.seqlen_q, kHeadDim});
  args.k = args.v = on_gpu(s.dtype, {s.batch, s.heads_kv, s.seqlen_kv, kHeadDim});
  args.options.causal = true;
  return args;
}
Plan plan(const AttentionArgs& args, const char* gpu = "h200") {
  return plan_attention_forward(args, DeviceInfo::by_name(gpu));
}
Plan plan(const Sizes& s, const char* gpu = "h200") { return plan(attention(s), gpu); }

KvCacheArgs cache(const Sizes& s) {
  KvCacheArgs args;
  args.q = on_gpu(s.dtype, {s.batch, s.heads_q, s.seqlen_q, kHeadDim});
  args.k_cache = args.v_cache = on_gpu(s.dtype, {s.batch, s.heads_kv, s.seqlen_kv, kHeadDim});
  args.cache_seqlens = on_gpu(DType::kInt32, {s.batch});
  return args;
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(GpuPlan, FewRowsBesideManyKeysAreSplitOverKeys) {
  for (const char* gpu : {"t4", "a100", "l4", "h200"}) {
    EXPECT_EQ(plan(Sizes{}, gpu).strategy, Strategy::kSplitKv) << gpu;
    EXPECT_EQ(plan(Sizes{.seqlen_q = 4, .seqlen_kv = 32768}, gpu).strategy, Strategy::kSplitKv) << gpu;
    EXPECT_EQ(plan(Sizes{.batch = 8, .seqlen_q = 4096}, gpu).strategy, Strategy::kSplitQ) << gpu;
    EXPECT_EQ(plan(Sizes{.seqlen_kv = 0}, gpu).strategy, Strategy::kSplitQ) << gpu;
  }
  EXPECT_EQ(plan(Sizes{.batch = 64}).strategy, Strategy::kSplitKv);
  EXPECT_NE(plan(Sizes{}).explain().find("split_kv"), std::string::npos);
}

TEST(GpuPlan, PackedProblemsStayParallelOverRows) {
  AttentionArgs args;
  args.q = on_gpu(DType::kFloat16, {1, 32, kHeadDim});
  args.k = args.v = on_gpu(DType::kFloat16, {8192, 8, kHeadDim});
  args.cu_seqlens_q = args.cu_seqlens_k = on_gpu(DType::kInt32, {2});
  EXPECT_EQ(plan(args).strategy, Strategy::kSplitQ);
  args.options.strategy = Strategy::kSplitKv;
  EXPECT_NE(refusal([&] { plan(args); }).find("packed sequences"), std::string::npos);
}

TEST(GpuPlan, FixedSplitsChooseTheirStrategy) {
  AttentionArgs args = attention({});
  args.options.split_size = 1000;
  const Plan fixed = plan(args);
  EXPECT_EQ(fixed.strategy, Strategy::kSplitKv);
  EXPECT_EQ(fixed.split_size, 1000);
  EXPECT_EQ(fixed.splits, 9);
  args.options.split_size = INT64_MAX;
  EXPECT_EQ(plan(args).splits, 1);
}

// Partial results are kept for the blocks of the GPU, not for the keys.
TEST(GpuPlan, WorkspaceDoesNotGrowWithTheKeys) {
  const int64_t bytes = plan(Sizes{.batch = 8, .seqlen_kv = 65536}, "a100").workspace_bytes;
  EXPECT_EQ(plan(Sizes{.batch = 8, .seqlen_kv = 1 << 20}, "a100").workspace_bytes, bytes);
  EXPECT_GT(bytes, 0);
  EXPECT_LT(bytes, 16 << 20);
}

TEST(GpuPlan, FewAlikeUnitsRunInClustersOnHopper) {
  const auto in_clusters = [](const Plan& p) {
    return p.explain().find("merge in shared memory") != std::string::npos;
  };
  const Plan one = plan(Sizes{});
  EXPECT_TRUE(in_clusters(one)) << one.explain();
  EXPECT_EQ(one.splits, 8);
  EXPECT_EQ(one.workspace_bytes, 0);
  EXPECT_EQ(plan(Sizes{.heads_q = 28, .heads_kv = 4}).splits, 16);
  const Plan two_long = plan(Sizes{.heads_q = 16, .heads_kv = 2, .seqlen_kv = 1 << 17});
  EXPECT_TRUE(in_clusters(two_long));
  EXPECT_EQ(two_long.splits, 32);  // four clusters each, which merge through the workspace
  EXPECT_GT(two_long.workspace_bytes, 0);
  EXPECT_TRUE(in_clusters(plan(Sizes{.heads_kv = 32})));
  EXPECT_TRUE(in_clusters(plan(Sizes{.batch = 8})));
  EXPECT_FALSE(in_clusters(plan(Sizes{}, "a100")));
  EXPECT_FALSE(in_clusters(plan(Sizes{.batch = 64})));
  EXPECT_FALSE(in_clusters(plan(Sizes{.heads_kv = 32, .seqlen_kv = 1 << 20})));
  AttentionArgs fixed = attention({});
  fixed.options.split_size = 1024;
  EXPECT_FALSE(in_clusters(plan(fixed)));
  const DeviceInfo h200 = DeviceInfo::by_name("h200");
  EXPECT_TRUE(in_clusters(plan_attention_with_kvcache(cache({}), h200)));
  EXPECT_FALSE(in_clusters(plan_attention_with_kvcache(cache({.batch = 2}), h200)));  // lengths differ
}

// Enough ranges of the row tiles' keys to fill the GPU's multiprocessors.
TEST(GpuPlan, FewQueriesBesideManyKeysAreRangesOfRowTilesOnHopper) {
  if (!catalog::kSm90) GTEST_SKIP() << "not built";
  const auto of = [](int64_t queries) { return plan(Sizes{.seqlen_q = queries, .seqlen_kv = 32768}); };
  for (const auto& [queries, splits] : {std::pair{32, 13}, {64, 8}, {128, 4}, {256, 2}, {768, 2}}) {
    const Plan ranges = of(queries);
    EXPECT_EQ(ranges.backend, Backend::kCudaSm90) << ranges.explain();
    EXPECT_EQ(ranges.strategy, Strategy::kSplitKv) << ranges.explain();
    EXPECT_EQ(ranges.splits, splits) << ranges.explain();
    EXPECT_GE(ranges.workspace_bytes, int64_t{splits} * 32 * queries * (kHeadDim + 1) * 4);
    EXPECT_NE(ranges.explain().find("even range(s) of the keys of a row tile"), std::string::npos);
  }
  EXPECT_EQ(of(1).backend, Backend::kCudaMma);
  for (const int64_t queries : {512, 1024, 4096}) EXPECT_EQ(of(queries).strategy, Strategy::kSplitQ) << queries;
  EXPECT_EQ(plan(Sizes{.seqlen_q = 128, .seqlen_kv = 32768}, "a100").backend, Backend::kCudaMma);
  AttentionArgs windowed = attention({.seqlen_q = 128, .seqlen_kv = 32768});
  windowed.options.window_left = 511;  // five tiles of keys
  EXPECT_LE(plan(windowed).splits, 5);
  KvCacheArgs step = cache({.batch = 4, .seqlen_q = 64, .seqlen_kv = 16384});
  const Plan cached = plan_attention_with_kvcache(step, DeviceInfo::by_name("h200"));
  EXPECT_TRUE(cached.backend == Backend::kCudaSm90 && cached.strategy == Strategy::kSplitKv) << cached.explain();
}

TEST(GpuPlan, RangesOfRowTilesThatAreAskedFor) {
  if (!catalog::kSm90) GTEST_SKIP() << "not built";
  AttentionArgs args = attention({});
  args.options.backend = Backend::kCudaSm90;
  EXPECT_EQ(plan(args).backend, Backend::kCudaSm90);
  args.options.strategy = Strategy::kSplitQ;
  EXPECT_EQ(plan(args).strategy, Strategy::kSplitQ);
  EXPECT_EQ(plan(args).workspace_bytes, 0);
  args = attention({.seqlen_q = 4096});
  args.options.backend = Backend::kCudaSm90, args.options.strategy = Strategy::kSplitKv;
  EXPECT_EQ(plan(args).strategy, Strategy::kSplitKv);
  EXPECT_EQ(plan(args).splits, 1);
  args.options.split_size = 1000;
  EXPECT_EQ(plan(args).split_size, 1000);
  EXPECT_EQ(plan(args).splits, 9);
  args.options.split_size = INT64_MAX;
  EXPECT_EQ(plan(args).splits, 1);
  args.options.split_size = 1;
  args.k.shape[2] = args.v.shape[2] = int64_t{1} << 24;
  EXPECT_NE(refusal([&] { plan(args); }).find("way out: give a larger split_size"), std::string::npos);
  // The batch has no say in what splits of a fixed size are given to.
  for (const int64_t queries : {1, 16, 64, 128, 512, 2048}) {
    for (const int64_t split_size : {64, 300, 4096}) {
      AttentionArgs one = attention({.seqlen_q = queries}), many = attention({.batch = 48, .seqlen_q = queries});
      one.options.split_size = many.options.split_size = split_size;
      for (const auto& call : {one, many}) EXPECT_EQ(plan(call).backend, Backend::kCudaMma) << queries;
      EXPECT_EQ(plan(one).strategy, Strategy::kSplitKv);
    }
  }
  AttentionArgs packed;
  packed.q = on_gpu(DType::kFloat16, {32, 32, kHeadDim});
  packed.k = packed.v = on_gpu(DType::kFloat16, {8192, 8, kHeadDim});
  packed.cu_seqlens_q = packed.cu_seqlens_k = on_gpu(DType::kInt32, {2});
  packed.options.backend = Backend::kCudaSm90, packed.options.strategy = Strategy::kSplitKv;
  EXPECT_NE(refusal([&] { plan(packed); }).find("missing: packed sequences"), std::string::npos);
}

TEST(GpuPlan, CachesRunOnTensorCores) {
  const DeviceInfo h200 = DeviceInfo::by_name("h200");
  KvCacheArgs args = cache({});
  Plan step = plan_attention_with_kvcache(args, h200);
  EXPECT_EQ(step.backend, Backend::kCudaMma);
  EXPECT_EQ(step.strategy, Strategy::kSplitKv);
  const int64_t without_rope = step.workspace_bytes;
  args.rope = Rope{on_gpu(DType::kFloat32, {8192, 64}), on_gpu(DType::kFloat32, {8192, 64}), RopeStyle::kHalf,
                   RopeIndex::kToken, 0};
  EXPECT_EQ(plan_attention_with_kvcache(args, h200).workspace_bytes, without_rope + 32 * kHeadDim * 2);
  args.k_cache = args.v_cache = on_gpu(DType::kFloat16, {600, 16, 8, kHeadDim});
  args.block_table = on_gpu(DType::kInt32, {1, 512});
  EXPECT_EQ(plan_attention_with_kvcache(args, h200).backend, Backend::kCudaMma);
  EXPECT_EQ(plan_attention_with_kvcache(cache({.dtype = DType::kFloat32}), h200).backend, Backend::kCudaNaive);
}

TEST(GpuPlan, PromptsIntoADenseCacheAreParallelOverRows) {
  for (const char* gpu : {"t4", "a100", "h200"}) {
    const DeviceInfo device = DeviceInfo::by_name(gpu);
    KvCacheArgs args = cache({.batch = 2, .seqlen_q = 2048});
    const Plan prompt = plan_attention_with_kvcache(args, device);
    const bool hopper = catalog::kSm90 && device.compute_capability == catalog::kHopper;
    const Backend backend = hopper ? Backend::kCudaSm90 : Backend::kCudaMma;
    EXPECT_EQ(prompt.backend, backend) << gpu;
    EXPECT_EQ(prompt.strategy, Strategy::kSplitQ) << gpu;
    EXPECT_EQ(prompt.workspace_bytes > 0, hopper) << gpu;  // a counter of row tiles
    args.options.strategy = Strategy::kSplitKv;
    EXPECT_EQ(plan_attention_with_kvcache(args, device).strategy, Strategy::kSplitKv) << gpu;
    args = cache({});
    args.options.strategy = Strategy::kSplitQ;
    EXPECT_EQ(plan_attention_with_kvcache(args, device).backend, backend) << gpu;
    args.k_cache = args.v_cache = on_gpu(DType::kFloat16, {600, 16, 8, kHeadDim});
    args.block_table = on_gpu(DType::kInt32, {1, 512});
    EXPECT_EQ(plan_attention_with_kvcache(args, device).backend, Backend::kCudaNaive) << gpu;
    args.options.strategy = Strategy::kAuto;
    args.q = on_gpu(DType::kFloat16, {1, 32, 2048, kHeadDim});
    EXPECT_EQ(plan_attention_with_kvcache(args, device).strategy, Strategy::kSplitKv) << gpu;
  }
}

TEST(GpuPlan, LargeHeadDimsSplitTheirKeysWhereRowsAreFew) {
  const DeviceInfo h200 = DeviceInfo::by_name("h200");
  const auto large = [](int64_t heads_q, int64_t seqlen_q) {
    AttentionArgs args;
    args.q = on_gpu(DType::kFloat16, {1, heads_q, seqlen_q, 576});
    args.k = on_gpu(DType::kFloat16, {1, 1, 8192, 576});
    args.v = on_gpu(DType::kFloat16, {1, 1, 8192, 512});
    return args;
  };
  const Plan one = plan_attention_forward(large(128, 1), h200);
  EXPECT_EQ(one.backend, Backend::kCudaMma);
  EXPECT_EQ(one.strategy, Strategy::kSplitKv);
  EXPECT_GT(one.splits, 8);
  EXPECT_LE(one.splits * 2, h200.multiprocessors);  // 128 heads are two tiles of rows
  EXPECT_EQ(plan_attention_forward(large(128, 8192), h200).strategy, Strategy::kSplitD);
  AttentionArgs fixed = large(16, 1);
  fixed.options.split_size = 1000;
  EXPECT_EQ(plan_attention_forward(fixed, h200).splits, 9);
  KvCacheArgs step;
  step.q = on_gpu(DType::kFloat16, {2, 8, 1, 512});
  step.k_cache = step.v_cache = on_gpu(DType::kFloat16, {2, 2, 4096, 512});
  step.cache_seqlens = on_gpu(DType::kInt32, {2});
  EXPECT_EQ(plan_attention_with_kvcache(step, h200).strategy, Strategy::kSplitKv);
  step.q = on_gpu(DType::kFloat16, {2, 8, 4096, 512});
  EXPECT_EQ(plan_attention_with_kvcache(step, h200).strategy, Strategy::kSplitD);
  EXPECT_EQ(plan_attention_with_kvcache(step, DeviceInfo::by_name("t4")).backend, Backend::kCudaMma);
}

TEST(GpuPlan, DevicesAndSizesThatCannotBeAreRefused) {
  DeviceInfo device = DeviceInfo::by_name("h200");
  device.multiprocessors = 0;
  EXPECT_NE(refusal([&] { plan_attention_forward(attention({}), device); }).find("device: got 0 multiprocessors"),
            std::string::npos);
  AttentionArgs args = attention({});
  args.q.shape[2] = int64_t{1} << 40, args.q.stride[2] = 0;
  EXPECT_NE(refusal([&] { plan(args); }).find("q: got [1, 32, 1099511627776, 128], expected at most 2^48 elements"),
            std::string::npos);
}

// Where cuda_sm90 cannot count, cuda_mma does.
TEST(GpuPlan, MoreRowsThanHopperCountsAreCudaMmas) {
  AttentionArgs args = attention({.heads_q = 1, .heads_kv = 1, .seqlen_q = int64_t{1} << 29, .seqlen_kv = 4096});
  EXPECT_EQ(plan(args).backend, Backend::kCudaMma);
  args.options.backend = Backend::kCudaSm90;
  EXPECT_NE(refusal([&] { plan(args); }).find("way out: use backend auto"), std::string::npos);
  const Sizes many{.batch = 1 << 26, .heads_q = 64, .heads_kv = 64, .seqlen_q = 1, .seqlen_kv = 1};
  args = attention(many);
  args.options.strategy = Strategy::kSplitQ;
  EXPECT_EQ(plan(args).backend, Backend::kCudaMma);
}

TEST(GpuPlan, RawIhaCachesStayOnCudaCores) {
  const DeviceInfo h200 = DeviceInfo::by_name("h200");
  IhaKvCacheArgs args;
  args.attention = cache({.heads_q = 8});
  args.w_q = args.w_k = args.w_v = on_gpu(DType::kFloat32, {8, 2, 8});
  args.kind = IhaCacheKind::kRaw;
  const Plan raw = plan_iha_attention_with_kvcache(args, h200);
  EXPECT_EQ(raw.backend, Backend::kCudaNaive);
  EXPECT_NE(raw.explain().find("raw IHA caches"), std::string::npos);
  args.attention.options.backend = Backend::kCudaMma;
  EXPECT_NE(refusal([&] { plan_iha_attention_with_kvcache(args, h200); }).find("raw IHA caches"), std::string::npos);
  args.kind = IhaCacheKind::kMixed;
  args.attention.k_cache = args.attention.v_cache = on_gpu(DType::kFloat16, {1, 8, 8192, 2, kHeadDim});
  EXPECT_EQ(plan_iha_attention_with_kvcache(args, h200).backend, Backend::kCudaMma);
}

// What a refusal says to do.
void take_way_out(const std::string& text, AttentionOptions& options) {
  const auto says = [&](const char* what) { return text.find(what, text.find("way out: ")) != std::string::npos; };
  if (says("backend auto")) options.backend = Backend::kAuto;
  if (says("strategy auto")) options.strategy = Strategy::kAuto;
  if (says("leave out split_size")) options.split_size = 0;
}

TEST(GpuPlan, RefusalsSayWhatIsMissingAndTheirWaysOutAreOnes) {
  int refused = 0, served = 0;
  // A second refusal may name what the first did not come to.
  const auto check = [&](AttentionOptions& options, const std::string& what, const auto& call) {
    const AttentionOptions asked = options;
    std::string text = refusal(call);
    ++(text.empty() ? served : refused);
    for (int step = 0; step < 3 && !text.empty(); ++step) {
      for (const char* part : {"required: ", "supported", "missing: ", "way out: "}) {
        EXPECT_NE(text.find(part), std::string::npos) << what << ": " << text;
      }
      take_way_out(text, options);
      const std::string next = refusal(call);
      EXPECT_NE(next, text) << what;
      text = next;
    }
    EXPECT_EQ(text, "") << what;
    options = asked;
  };
  for (const char* gpu : {"t4", "a100", "l4", "h200"}) {
    const DeviceInfo device = DeviceInfo::by_name(gpu);
    for (const Backend backend : {Backend::kAuto, Backend::kCudaNaive, Backend::kCudaMma, Backend::kCudaSm90}) {
      if (backend == Backend::kCudaSm90 && !catalog::kSm90) continue;
      for (const Strategy strategy : {Strategy::kAuto, Strategy::kSplitQ, Strategy::kSplitKv, Strategy::kSplitD}) {
        for (const int64_t split_size : {0, 256}) {
          if (split_size > 0 && strategy != Strategy::kAuto && strategy != Strategy::kSplitKv) continue;
          for (const int64_t dim : {64, 100, 256, 264, 512, 1024}) {
            AttentionArgs args;
            args.q = on_gpu(DType::kFloat16, {2, 8, 3, dim});
            args.k = args.v = on_gpu(DType::kFloat16, {2, 2, 700, dim});
            args.options.backend = backend, args.options.strategy = strategy, args.options.split_size = split_size;
            const std::string what = std::string(gpu) + " head dim " + std::to_string(dim);
            check(args.options, what, [&] { plan_attention_forward(args, device); });
            IhaKvCacheArgs step;
            step.attention.q = on_gpu(DType::kFloat16, {2, 8, 1, dim});
            step.attention.k_cache = step.attention.v_cache = on_gpu(DType::kFloat16, {2, 8, 700, dim});
            step.attention.cache_seqlens = on_gpu(DType::kInt32, {2});
            step.attention.options = args.options;
            step.w_q = step.w_k = step.w_v = on_gpu(DType::kFloat32, {8, 2, 8});
            step.kind = IhaCacheKind::kRaw;
            check(step.attention.options, what + " raw cache", [&] { plan_iha_attention_with_kvcache(step, device); });
          }
        }
      }
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(served, 100);
}

}  // namespace
}  // namespace plait
