// The public C++ API through the shared library: plan, run, refusals that leave outputs untouched.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "plait/iha.hpp"
#include "plait/version.hpp"
#include "support/workspace.hpp"

namespace plait {
namespace {

using testing::Workspace;
using testing::workspace_of;

// Random q, k, v [1, 2, S, 16] and NaN outputs.
struct Call {
  static constexpr int64_t kHeads = 2, kDim = 16;
  int64_t seqlen;
  std::vector<float> q, k, v, out, lse;
  AttentionArgs args;
  AttentionOutputs outputs;

  explicit Call(int64_t length) : seqlen(length) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal;
    for (auto* tensor : {&q, &k, &v}) {
      tensor->resize(static_cast<size_t>(kHeads * seqlen * kDim));
      for (float& value : *tensor) value = normal(engine);
    }
    out.assign(q.size(), NAN);
    lse.assign(static_cast<size_t>(kHeads * seqlen), NAN);
    const auto view = [&](std::vector<float>& t) {
      return TensorView::contiguous(t.data(), DType::kFloat32, {1, kHeads, seqlen, kDim});
    };
    args.q = view(q);
    args.k = view(k);
    args.v = view(v);
    args.options.causal = true;
    outputs = {view(out), TensorView::contiguous(lse.data(), DType::kFloat32, {1, kHeads, seqlen})};
  }
  void run(Backend backend, Strategy strategy = Strategy::kAuto) {
    args.options.backend = backend;
    args.options.strategy = strategy;
    const Plan plan = plan_attention_forward(args, DeviceInfo::host(2));
    attention_forward(args, outputs, plan, workspace_of(plan).get(), Executor::threads());
  }
};

TEST(Api, CpuAgreesWithTheReferenceForEveryStrategy) {
  Call reference(300);
  reference.run(Backend::kReference);
  for (const Strategy strategy : {Strategy::kAuto, Strategy::kSplitQ, Strategy::kSplitKv}) {
    Call cpu(300);
    cpu.run(Backend::kCpu, strategy);
    for (size_t i = 0; i < cpu.out.size(); ++i) ASSERT_NEAR(cpu.out[i], reference.out[i], 2e-5) << i;
    for (size_t i = 0; i < cpu.lse.size(); ++i) ASSERT_NEAR(cpu.lse[i], reference.lse[i], 2e-5) << i;
  }
}

TEST(Api, SplitStrategiesGiveDifferentPlans) {
  Call call(512);
  call.args.options.strategy = Strategy::kSplitQ;
  const Plan split_q = plan_attention_forward(call.args, DeviceInfo::host(2));
  call.args.options.strategy = Strategy::kSplitKv;
  const Plan split_kv = plan_attention_forward(call.args, DeviceInfo::host(2));
  EXPECT_EQ(split_q.strategy, Strategy::kSplitQ);
  EXPECT_EQ(split_kv.strategy, Strategy::kSplitKv);
  EXPECT_NE(split_q.explain(), split_kv.explain());
}

TEST(Api, RefusalsLeaveOutputsUntouched) {
  Call call(64);
  const Plan plan = plan_attention_forward(call.args, DeviceInfo::host(1));
  const Workspace workspace = workspace_of(plan);
  call.args.options.causal = false;  // the plan is for another problem
  EXPECT_THROW(attention_forward(call.args, call.outputs, plan, workspace.get(), Executor::threads()), Error);
  call.args.options.causal = true;
  EXPECT_THROW(
      attention_forward(call.args, call.outputs, plan, static_cast<char*>(workspace.get()) + 4, Executor::threads()),
      Error);
  call.args.options.scale = NAN;
  EXPECT_THROW(attention_forward(call.args, call.outputs, plan, workspace.get(), Executor::threads()), Error);
  for (const float value : call.out) ASSERT_TRUE(std::isnan(value));
  for (const float value : call.lse) ASSERT_TRUE(std::isnan(value));
}

TEST(Api, NullWorkspaceAndForeignDevicesAreRefused) {
  Call call(64);
  const Plan plan = plan_attention_forward(call.args, DeviceInfo::host(1));
  if (plan.workspace_bytes > 0) {
    EXPECT_THROW(attention_forward(call.args, call.outputs, plan, nullptr, Executor::threads()), Error);
  }
  EXPECT_THROW(plan_attention_forward(call.args, DeviceInfo::by_name("h200")), Error);
  DeviceInfo none = DeviceInfo::host(1);
  none.workers = 0;
  EXPECT_THROW(plan_attention_forward(call.args, none), Error);
}

// bfloat16 tensors of a GPU that need not exist: planning reads no element.
AttentionBackwardArgs on_gpu(int64_t head_dim, int64_t head_dim_v) {
  const auto view = [](std::initializer_list<int64_t> shape, DType dtype) {
    alignas(256) static char address;
    TensorView tensor = TensorView::contiguous(&address, dtype, shape);
    tensor.device = {DeviceKind::kCuda, 0};
    return tensor;
  };
  AttentionBackwardArgs args;
  args.forward.q = args.forward.k = view({1, 2, 100, head_dim}, DType::kBFloat16);
  args.forward.v = args.out = args.dout = view({1, 2, 100, head_dim_v}, DType::kBFloat16);
  args.lse = view({1, 2, 100}, DType::kFloat32);
  return args;
}

TEST(Api, LargeHeadDimsArePlannedAsSplitD) {
  for (const int64_t dim : {264, 512, 1024}) {
    const AttentionBackwardArgs args = on_gpu(dim, dim);
    const Plan forward = plan_attention_forward(args.forward, DeviceInfo::by_name("h200"));
    EXPECT_EQ(forward.backend, Backend::kCudaMma);
    EXPECT_EQ(forward.strategy, Strategy::kSplitD);
    EXPECT_NE(forward.explain().find("split_d: a head dim of"), std::string::npos) << forward.explain();
    EXPECT_EQ(forward.workspace_bytes, 0);
    const Plan backward = plan_attention_backward(args, DeviceInfo::by_name("a100"));
    EXPECT_EQ(backward.backend, Backend::kCudaMma);
    EXPECT_GE(backward.workspace_bytes, 3 * 2 * 100 * 4);  // delta and RowPairs
  }
  EXPECT_EQ(plan_attention_forward(on_gpu(64, 512).forward, DeviceInfo::by_name("h200")).strategy, Strategy::kSplitD);
  EXPECT_EQ(plan_attention_forward(on_gpu(256, 256).forward, DeviceInfo::by_name("h200")).strategy, Strategy::kSplitQ);
}

TEST(Api, LargeHeadDimsWithoutATileGoToTheNaiveBackend) {
  AttentionBackwardArgs args = on_gpu(1024, 1024);
  const DeviceInfo small = DeviceInfo::by_name("l4");
  const Plan plan = plan_attention_forward(args.forward, small);
  EXPECT_EQ(plan.backend, Backend::kCudaNaive);
  EXPECT_EQ(plan.strategy, Strategy::kSplitQ);
  EXPECT_NE(plan.explain().find("required head dims 1024 and 1024, supported tiles of split_d that fit 99 KB"),
            std::string::npos)
      << plan.explain();
  EXPECT_EQ(plan_attention_backward(args, small).backend, Backend::kCudaNaive);
  args.forward.options.strategy = Strategy::kSplitD;
  EXPECT_THROW(plan_attention_forward(args.forward, small), Error);
  EXPECT_NO_THROW(plan_attention_forward(args.forward, DeviceInfo::by_name("h200")));
  args.forward.options.strategy = Strategy::kAuto, args.forward.options.backend = Backend::kCudaMma;
  EXPECT_THROW(plan_attention_forward(args.forward, small), Error);
  EXPECT_THROW(plan_attention_backward(args, small), Error);
}

TEST(Api, StrategiesOfOtherHeadDimsAreRefused) {
  AttentionArgs args = on_gpu(128, 128).forward;
  args.options.strategy = Strategy::kSplitD;
  EXPECT_THROW(plan_attention_forward(args, DeviceInfo::by_name("h200")), Error);
  args = on_gpu(512, 512).forward;
  args.options.strategy = Strategy::kSplitQ;
  EXPECT_EQ(plan_attention_forward(args, DeviceInfo::by_name("h200")).backend, Backend::kCudaNaive);
  args.options.backend = Backend::kCudaMma;
  EXPECT_THROW(plan_attention_forward(args, DeviceInfo::by_name("h200")), Error);
}

TEST(Api, VersionIsThatOfTheProject) { EXPECT_EQ(std::string(version()).find("0."), 0u); }

}  // namespace
}  // namespace plait
