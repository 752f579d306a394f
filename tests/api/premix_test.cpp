// Premixes of several tensors in one call: what is refused, how they are planned. That results are right is shown by
// the fuzzer (fuzz_mix.cpp).
#include <gtest/gtest.h>

#include <vector>

#include "cuda/iha/schedule.hpp"
#include "plait/iha.hpp"

namespace plait {
namespace {

constexpr int64_t kHeads = 3, kPseudo = 2, kLength = 5, kDim = 8;

struct Memory {
  std::vector<float> x = std::vector<float>(kHeads * kLength * kDim, 0.5f);
  std::vector<float> w = std::vector<float>(kHeads * kPseudo * kHeads, 0.25f);
  std::vector<float> y = std::vector<float>(kHeads * kLength * kPseudo * kDim, -1.0f);

  PremixArgs args() {
    PremixArgs args;
    args.x = TensorView::contiguous(x.data(), DType::kFloat32, {1, kHeads, kLength, kDim});
    args.w = TensorView::contiguous(w.data(), DType::kFloat32, {kHeads, kPseudo, kHeads});
    return args;
  }
  TensorView result() { return TensorView::contiguous(y.data(), DType::kFloat32, {1, kHeads, kLength, kPseudo, kDim}); }
};

std::string refusal(const std::vector<PremixArgs>& args, const std::vector<TensorView>& ys) {
  try {
    const DeviceInfo device = DeviceInfo::host();
    const Plan plan = plan_premix_forward(args, device);
    std::vector<std::byte> workspace(static_cast<size_t>(plan.workspace_bytes) + 64);
    void* aligned = workspace.data();
    size_t space = workspace.size();
    std::align(64, static_cast<size_t>(plan.workspace_bytes), aligned, space);
    premix_forward(args, ys, plan, aligned, Executor::threads());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Premixes, WrongArgumentsAreNamedWithTheirNumber) {
  Memory a, b;
  std::vector<PremixArgs> args{a.args(), b.args()};
  const std::vector<TensorView> ys{a.result(), b.result()};
  EXPECT_EQ(refusal(args, ys), "");
  args[1].w.shape[1] = kPseudo + 1;
  EXPECT_EQ(refusal(args, ys).find("y[1]: "), 0u) << refusal(args, ys);
  args[1].w.shape[0] = kHeads + 1;
  EXPECT_EQ(refusal(args, ys).find("w[1]: "), 0u) << refusal(args, ys);
  for (const int rank : {-1, INT32_MIN, kMaxRank + 1, INT32_MAX}) {
    args[1].w.rank = rank;
    EXPECT_EQ(refusal(args, ys).find("w[1]: got rank "), 0u) << refusal(args, ys);
  }
  EXPECT_EQ(refusal({}, {}).find("args: "), 0u);
  EXPECT_EQ(refusal({a.args()}, ys).find("args: got 1 premixes and results of 2"), 0u);
}

TEST(Premixes, OneMayNotWriteWhatAnotherReadsOrWrites) {
  Memory a, b, large;
  large.x.resize(large.y.size());
  TensorView over = a.result();
  const auto check = [&](const std::vector<PremixArgs>& args, const std::vector<TensorView>& ys, const char* text) {
    EXPECT_EQ(refusal(args, ys).find(text), 0u) << refusal(args, ys) << " instead of " << text;
  };
  check({a.args(), b.args()}, {a.result(), a.result()}, "y[0]: is an output and shares memory with y[1]; ");
  over.data = large.x.data();
  check({a.args(), large.args()}, {over, b.result()}, "y[0]: is an output and shares memory with x[1]; ");
  PremixArgs turned = b.args();
  turned.rope.emplace();
  turned.rope->cos = turned.rope->sin = TensorView::contiguous(over.data, DType::kFloat32, {kLength, kDim / 2});
  check({turned, a.args()}, {b.result(), over}, "y[1]: is an output and shares memory with rope cos[0]; ");
}

TEST(Premixes, ShareOneBackend) {
  Memory a, b;
  std::vector<PremixArgs> args{a.args(), b.args()};
  args[0].backend = Backend::kCpu, args[1].backend = Backend::kReference;
  EXPECT_EQ(refusal(args, {a.result(), b.result()}).find("backend: got cpu and reference"), 0u);
}

// In a launch for several, the kernel is that of the most heads: every job's wide rows must fit its registers.
TEST(Premixes, ALaunchForSeveralHoldsTheWideRowsOfAll) {
  using namespace cuda::iha;
  const Limits limits = Limits::of(DeviceInfo::by_name("h200"));
  for (const int64_t most : {8, 16, 20, 32, 40, 64}) {
    for (const int64_t few : {1, 4, 16}) {
      for (const int64_t pseudo : {1, 4, 10, 16}) {
        std::vector<PremixProblem> problems(2);
        for (PremixProblem& p : problems) {
          p.op = Op::kPremixBackward, p.dtype = DType::kBFloat16, p.batch = 1, p.seqlen = 64, p.head_dim = 64;
        }
        problems[0].heads = most, problems[0].pseudo_heads = 1;
        problems[1].heads = few, problems[1].pseudo_heads = pseudo;
        if (!supports(problems[0], limits) || !supports(problems[1], limits)) continue;
        ASSERT_TRUE(supports_together(problems, limits));
        const std::vector<MixShape> shapes{MixShape::of(problems[0]), MixShape::of(problems[1])};
        const auto plan = plan_contract(shapes, {true, true}, limits);
        for (const ContractLaunch& launch : plan->launches) {
          if (!launch.makes.gradient) continue;
          int heads = 0;
          for (const ContractJob& job : launch.jobs) heads = std::max(heads, job.narrow_count);
          for (const ContractJob& job : launch.jobs) EXPECT_LE(job.wide_count, contract_max_wide(heads)) << most;
        }
      }
    }
  }
}

}  // namespace
}  // namespace plait
