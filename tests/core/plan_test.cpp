// The planner alone, with backends that only record what they were asked: choice, refusals, explain.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "catalog/catalog.hpp"
#include "core/registry.hpp"

namespace plait {
namespace {

void plan_fake(const AttentionProblem&, const DeviceInfo& device, Plan& plan) {
  if (plan.strategy == Strategy::kAuto) plan.strategy = Strategy::kSplitQ;
  plan.tile_m = 64;
  plan.tile_n = 128;
  plan.workers = device.workers;
  plan.reasons.emplace_back("a fake reason");
}

constexpr Implementation fake(Backend backend, decltype(Implementation::plan_attention) plan_attention) {
  return {.backend = backend, .plan_attention = plan_attention};
}
constexpr std::array<Implementation, 5> kFakes{fake(Backend::kCpu, plan_fake), fake(Backend::kReference, nullptr),
                                               fake(Backend::kCudaMma, plan_fake), fake(Backend::kCudaSm90, plan_fake),
                                               fake(Backend::kCudaNaive, plan_fake)};

AttentionProblem problem() {
  AttentionProblem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = 2;
  p.seqlen_q = p.seqlen_kv = 8;
  p.head_dim = p.head_dim_v = 64;
  return p;
}

std::string refusal(const AttentionProblem& p, const DeviceInfo& device = DeviceInfo::host(1)) {
  try {
    make_plan(p, device, kFakes);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Plan, AutoNeverPicksTheReference) {
  EXPECT_EQ(make_plan(problem(), DeviceInfo::host(1), kFakes).backend, Backend::kCpu);
  AttentionProblem p = problem();
  p.dtype = p.out_dtype = DType::kFloat64;
  EXPECT_NE(refusal(p).find("missing: float64"), std::string::npos) << refusal(p);
  p.backend = Backend::kReference;
  EXPECT_EQ(make_plan(p, DeviceInfo::host(1), kFakes).backend, Backend::kReference);
}

TEST(Plan, StrategyIsHonouredOrRefused) {
  AttentionProblem p = problem();
  p.strategy = Strategy::kSplitKv;
  EXPECT_EQ(make_plan(p, DeviceInfo::host(1), kFakes).strategy, Strategy::kSplitKv);
  p.strategy = Strategy::kSplitD;
  const std::string text = refusal(p);
  for (const char* part : {"required:", "supported by cpu:", "missing: strategy split_d", "way out:"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  p.strategy = Strategy::kAuto;
  p.split_size = 256;
  EXPECT_EQ(make_plan(p, DeviceInfo::host(1), kFakes).strategy, Strategy::kSplitKv);
}

TEST(Plan, RefusesBackendsWithoutTheOp) {
  AttentionProblem p = problem();
  p.op = Op::kAttentionBackward;
  p.backend = Backend::kCudaSm90;
  const char* why = catalog::kSm90 ? "cuda_sm90 has no attention_backward" : "cuda_sm90 is not in this build";
  EXPECT_NE(refusal(p).find(why), std::string::npos) << refusal(p);
  p.op = Op::kAttentionForward;
  p.backend = Backend::kAuto;
  p.device.kind = DeviceKind::kCuda;
  EXPECT_NE(refusal(p), "");  // a plan for the CPU with tensors on a GPU
}

AttentionProblem on_gpu(DType dtype, int64_t head_dim) {
  AttentionProblem p = problem();
  p.device.kind = DeviceKind::kCuda;
  p.dtype = p.out_dtype = dtype;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

TEST(Plan, GpusGetTensorCoresWhereTheyCanBeUsed) {
  const auto backend = [](DType dtype, int64_t head_dim, const char* gpu) {
    return make_plan(on_gpu(dtype, head_dim), DeviceInfo::by_name(gpu), kFakes).backend;
  };
  for (const char* gpu : {"a100", "a10", "l4", "rtx4090", "h200"}) {
    const bool hopper = catalog::kSm90 && DeviceInfo::by_name(gpu).compute_capability == catalog::kHopper;
    EXPECT_EQ(backend(DType::kBFloat16, 128, gpu), hopper ? Backend::kCudaSm90 : Backend::kCudaMma) << gpu;
    EXPECT_EQ(backend(DType::kFloat16, 256, gpu), hopper ? Backend::kCudaSm90 : Backend::kCudaMma) << gpu;
    EXPECT_EQ(backend(DType::kFloat16, 264, gpu), Backend::kCudaMma) << gpu;
    EXPECT_EQ(backend(DType::kFloat16, 300, gpu), Backend::kCudaNaive) << gpu;
    EXPECT_EQ(backend(DType::kBFloat16, 100, gpu), Backend::kCudaNaive) << gpu;
    EXPECT_EQ(backend(DType::kFloat32, 64, gpu), Backend::kCudaNaive) << gpu;
  }
  AttentionProblem iha = on_gpu(DType::kBFloat16, 128);
  for (const HeadMode mode : {HeadMode::kJoint, HeadMode::kInterleaved}) {
    iha.mode = mode, iha.pseudo_heads = 4;
    EXPECT_EQ(make_plan(iha, DeviceInfo::by_name("h200"), kFakes).backend,
              catalog::kSm90 ? Backend::kCudaSm90 : Backend::kCudaMma);
  }
  EXPECT_EQ(backend(DType::kFloat16, 128, "t4"), Backend::kCudaMma);
  EXPECT_EQ(backend(DType::kBFloat16, 128, "t4"), Backend::kCudaNaive);
  AttentionProblem p = on_gpu(DType::kBFloat16, 128);
  p.backend = Backend::kCudaMma;
  EXPECT_NE(refusal(p, DeviceInfo::by_name("t4")).find("missing: bfloat16"), std::string::npos);
  p = on_gpu(DType::kFloat64, 64);
  EXPECT_NE(refusal(p, DeviceInfo::by_name("h200")).find("missing: float64"), std::string::npos);
  p = on_gpu(DType::kFloat32, 64);
  p.backend = Backend::kReference;
  EXPECT_NE(refusal(p, DeviceInfo::by_name("h200")).find("missing: cuda tensors"), std::string::npos);
}

TEST(Plan, RefusalsSayEachThingOnceAndTheWayOut) {
  AttentionProblem p = on_gpu(DType::kFloat16, 100);
  p.backend = Backend::kCudaMma;
  std::string text = refusal(p, DeviceInfo::by_name("h200"));
  EXPECT_NE(text.find("head dims 8 to 256 in multiples of 8"), std::string::npos) << text;
  EXPECT_NE(text.find("missing: head dim 100. way out: use backend auto"), std::string::npos) << text;
  EXPECT_EQ(text.find("supported by"), text.rfind("supported by")) << text;
  p = problem();
  p.backend = Backend::kCudaMma;
  text = refusal(p);
  EXPECT_NE(text.find("missing: cpu tensors"), std::string::npos) << text;
  EXPECT_EQ(text.find("compute capability"), std::string::npos) << text;
  EXPECT_NE(text.find("way out: move the tensors to a GPU, or use backend auto"), std::string::npos) << text;
  p.backend = Backend::kCpu;
  p.strategy = Strategy::kSplitD;
  text = refusal(p);
  EXPECT_NE(text.find("head dims 1 to 1024;"), std::string::npos) << text;
}

TEST(Plan, IsAPrintableValueBoundToItsProblem) {
  const Plan a = make_plan(problem(), DeviceInfo::host(2), kFakes),
             b = make_plan(problem(), DeviceInfo::host(2), kFakes);
  EXPECT_EQ(a.explain(), b.explain());
  EXPECT_NE(a.explain().find("split_q"), std::string::npos);
  EXPECT_NE(a.explain().find("a fake reason"), std::string::npos);
  AttentionProblem other = problem();
  other.causal = true;
  EXPECT_NE(make_plan(other, DeviceInfo::host(2), kFakes).fingerprint, a.fingerprint);
}

TEST(Plan, EveryCatalogRowNamesRealCapabilities) {
  for (const catalog::Support& support : catalog::supports()) {
    EXPECT_NE(support.dtypes, 0u);
    EXPECT_GE(support.max_head_dim, 128);
    EXPECT_GE(support.head_dim_multiple, 1);
  }
}

TEST(Names, ParseWhatTheyPrint) {
  for (const Backend backend : {Backend::kAuto, Backend::kReference, Backend::kCpu, Backend::kCudaNaive,
                                Backend::kCudaMma, Backend::kCudaSm90}) {
    EXPECT_EQ(parse_backend(backend_name(backend)), backend);
  }
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kSplitQ, Strategy::kSplitKv, Strategy::kSplitD}) {
    EXPECT_EQ(parse_strategy(strategy_name(strategy)), strategy);
  }
  EXPECT_THROW(parse_backend("gpu"), Error);
  EXPECT_THROW(parse_strategy(""), Error);
}

TEST(Device, NamesAreKnownOrListed) {
  for (const std::string& name : DeviceInfo::known_names()) EXPECT_EQ(DeviceInfo::by_name(name).name, name);
  try {
    DeviceInfo::by_name("h20000");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("h200"), std::string::npos);
  }
}

}  // namespace
}  // namespace plait
