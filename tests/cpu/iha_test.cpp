// Premix with RoPE and collapse on the CPU backend against the float64 oracle, and their bit-equality.
#include "cpu/run.hpp"

namespace plait::testing {
namespace {

struct MixBars {
  double value, weight;
};
MixBars mix_bars(double slack, DType dtype, DType weight) {
  const auto bar = [](DType type) {
    return type == DType::kBFloat16 ? 2.6e-3 : type == DType::kFloat16 ? 2.6e-3 / 8 : 2e-6;
  };
  return {slack * bar(dtype), slack * bar(weight)};
}

template <class Problem, class Tensors>
Plan run_mix(const Problem& problem, const Tensors& t, const RunOptions& options) {
  const bool premix = std::is_same_v<Problem, PremixProblem>;
  const bool forward = problem.op == (premix ? Op::kPremixForward : Op::kCollapseForward);
  return plan_and_run(
      options, problem.op, Strategy::kAuto,
      [&](const DeviceInfo& device, Plan& plan) {
        if constexpr (std::is_same_v<Problem, PremixProblem>) {
          cpu::plan_premix(problem, device, plan);
        } else {
          cpu::plan_collapse(problem, device, plan);
        }
      },
      [&](const Plan& plan, void* workspace, const Executor& executor) {
        if constexpr (std::is_same_v<Problem, PremixProblem>) {
          (forward ? cpu::premix_forward : cpu::premix_backward)(plan, problem, t, workspace, executor);
        } else {
          (forward ? cpu::collapse_forward : cpu::collapse_backward)(plan, problem, t, workspace, executor);
        }
      });
}

// `slack`: a lone 16-bit value can be off by half a unit in the last place, more than the rms of many.
void check_premix(const PremixCase& c, double slack = 1.0) {
  Premix mine(c), oracle(c);
  mine.problem.op = Op::kPremixForward;
  run_mix(mine.problem, mine.tensors, {});
  mine.problem.op = Op::kPremixBackward;
  run_mix(mine.problem, mine.tensors, {});
  PremixTensors exact = oracle.tensors;
  exact.y = oracle.arena.poisoned(DType::kFloat64, oracle.y_shape);
  exact.dx = oracle.arena.poisoned(DType::kFloat64, oracle.x_shape);
  reference::premix_forward(oracle.problem, exact);
  reference::premix_backward(oracle.problem, exact);
  const MixBars bars = mix_bars(slack, c.problem.dtype, c.problem.weight_dtype);
  const PremixTensors& t = mine.tensors;
  expect_close(values(t.y, mine.y_shape), values(exact.y, mine.y_shape), bars.value, 0, "y");
  expect_close(values(t.dx, mine.x_shape), values(exact.dx, mine.x_shape), bars.value, 0, "dx");
  expect_close(values(as_canonical(t.dw), shape_of(t.dw)), values(as_canonical(exact.dw), shape_of(t.dw)), bars.weight,
               0, "dw");
  EXPECT_EQ(mine.arena.written(t.y.data), elements(mine.y_shape));
  EXPECT_EQ(mine.arena.written(t.dx.data), elements(mine.x_shape));
  EXPECT_EQ(mine.arena.written(t.dw.data), elements(shape_of(t.dw)));
}

PremixCase premix_case(uint64_t seed, int64_t heads, int64_t seqlen, int64_t pseudo, int64_t dim) {
  PremixCase c;
  c.problem.batch = 2, c.problem.heads = heads, c.problem.seqlen = seqlen;
  c.problem.pseudo_heads = pseudo, c.problem.head_dim = dim;
  c.strides = Strides::kRandom;
  c.seed = seed;
  return c;
}

TEST(CpuPremix, SizesAndDtypes) {
  uint64_t seed = 1;
  for (const auto& [heads, seqlen, pseudo, dim] : std::initializer_list<std::array<int64_t, 4>>{{1, 1, 1, 1},
                                                                                                {3, 20, 2, 7},
                                                                                                {8, 33, 4, 64},
                                                                                                {5, 17, 3, 80},
                                                                                                {17, 5, 1, 257},
                                                                                                {2, 3, 2, 1024},
                                                                                                {4, 0, 2, 16}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const bool fp32_weights : {true, false}) {
        SCOPED_TRACE(::testing::Message() << heads << " heads, N " << seqlen << ", P " << pseudo << ", D " << dim
                                          << " dtype " << static_cast<int>(dtype) << fp32_weights);
        PremixCase c = premix_case(seed++, heads, seqlen, pseudo, dim);
        c.problem.dtype = dtype, c.problem.weight_dtype = fp32_weights ? DType::kFloat32 : dtype;
        check_premix(c, dim == 1 ? 1.6 : 1.0);
      }
    }
  }
}

TEST(CpuPremix, Rope) {
  uint64_t seed = 100;
  for (const RopeStyle style : {RopeStyle::kHalf, RopeStyle::kPairs}) {
    for (const RopeIndex index : {RopeIndex::kToken, RopeIndex::kRow}) {
      for (const int64_t rope_dim : {2, 24, 40}) {
        SCOPED_TRACE(::testing::Message() << "style " << static_cast<int>(style) << " index " << static_cast<int>(index)
                                          << " D_rot " << rope_dim);
        PremixCase c = premix_case(seed++, 4, 37, 3, 40);
        c.problem.rope_style = style, c.problem.rope_index = index, c.problem.rope_dim = rope_dim;
        c.problem.rope_offset = 11;
        check_premix(c);
        c.lens = {5, 0, 30, 12}, c.tail = 4;
        check_premix(c);
        c.other_lens = {9, 0, 31, 12};
        check_premix(c);
      }
    }
  }
}

TEST(CpuPremix, BitEqualForAnyWorkersAndEveryTargetIsClose) {
  PremixCase c = premix_case(7, 6, 300, 2, 48);
  c.problem.rope_dim = 48;
  std::vector<double> once;
  for (const int32_t workers : {1, 2, 3}) {
    Premix p(c);
    p.problem.op = Op::kPremixForward;
    run_mix(p.problem, p.tensors, {.workers = workers});
    p.problem.op = Op::kPremixBackward;
    run_mix(p.problem, p.tensors, {.workers = workers});
    std::vector<double> all = values(p.tensors.y, p.y_shape);
    for (const auto& more :
         {values(p.tensors.dx, p.x_shape), values(as_canonical(p.tensors.dw), shape_of(p.tensors.dw))}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    if (workers == 1) once = all;
    EXPECT_EQ(all, once) << workers;
  }
  for (const int64_t target : targets()) {
    const ChosenTarget chosen(target);
    SCOPED_TRACE(hwy::TargetName(target));
    check_premix(c);
  }
}

TEST(CpuCollapse, BothForms) {
  uint64_t seed = 200;
  for (const bool global : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const auto& [heads, seqlen, pseudo, dim] : std::initializer_list<std::array<int64_t, 4>>{
               {1, 1, 1, 1}, {3, 40, 2, 20}, {4, 9, 5, 130}, {2, 7, 20, 16}}) {
        SCOPED_TRACE(::testing::Message() << "global " << global << " dtype " << static_cast<int>(dtype) << " " << heads
                                          << " heads, N " << seqlen << ", P " << pseudo << ", D " << dim);
        CollapseCase c;
        c.problem.batch = 2, c.problem.heads = heads, c.problem.seqlen = seqlen;
        c.problem.pseudo_heads = pseudo, c.problem.head_dim = dim;
        c.problem.global = global, c.problem.dtype = dtype,
        c.problem.weight_dtype = seed % 2 == 0 ? DType::kFloat32 : dtype;
        c.strides = Strides::kRandom, c.seed = seed++;
        Collapse mine(c), oracle(c);
        mine.problem.op = Op::kCollapseForward;
        run_mix(mine.problem, mine.tensors, {});
        mine.problem.op = Op::kCollapseBackward;
        run_mix(mine.problem, mine.tensors, {});
        CollapseTensors exact = oracle.tensors;
        exact.y = oracle.arena.poisoned(DType::kFloat64, oracle.y_shape);
        exact.dx = oracle.arena.poisoned(DType::kFloat64, oracle.x_shape);
        reference::collapse_forward(oracle.problem, exact);
        reference::collapse_backward(oracle.problem, exact);
        const MixBars bars = mix_bars(dim == 1 ? 1.6 : 1.0, dtype, c.problem.weight_dtype);
        const CollapseTensors& t = mine.tensors;
        expect_close(values(t.y, mine.y_shape), values(exact.y, mine.y_shape), bars.value, 0, "y");
        expect_close(values(t.dx, mine.x_shape), values(exact.dx, mine.x_shape), bars.value, 0, "dx");
        expect_close(values(as_canonical(t.dr), shape_of(t.dr)), values(as_canonical(exact.dr), shape_of(t.dr)),
                     bars.weight, 0, "dr");
        EXPECT_EQ(mine.arena.written(t.dx.data), elements(mine.x_shape));
      }
    }
  }
}

}  // namespace
}  // namespace plait::testing
