// Premix with RoPE and collapse of both CUDA backends against the float64 reference; their determinism.
#include <fmt/format.h>

#include <array>

#include "cuda/iha/schedule.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

// Weights of 16 bits round like values, but are few, so that one of them can be off by half a unit in the last place;
// on tensor cores, RoPE rounds the rotated gradient that dw sums.
double weight_bar(DType dtype, DType weight, bool tensor_cores) {
  return 1.6 * (tensor_cores ? std::max(bars_of(dtype).out, bars_of(weight).out) : bars_of(weight).out);
}

// Also by what fits the shared memory that is planned for, forward and backward.
template <class Problem>
bool takes(const CudaTarget& target, Problem p, Op backward) {
  if (target.backend() != Backend::kCudaMma) return true;
  if (!tensor_cores_take(p.dtype, p.head_dim % 8 == 0 ? 8 : p.head_dim, 8)) return false;
  const auto limits = cuda::iha::Limits::of(target.device());
  const bool forward = cuda::iha::supports(p, limits);
  p.op = backward;
  return forward && p.heads <= 64 && p.pseudo_heads <= 16 && cuda::iha::supports(p, limits);
}

template <class Case>
struct Named {
  std::string name;
  Case problem;
  double slack;
};

void check(const Named<PremixCase>& named) {
  const PremixCase& c = named.problem;
  const PremixProblem& p = c.problem;
  for (const CudaTarget* target : {&naive(), &mma()}) {
    if (!takes(*target, p, Op::kPremixBackward)) continue;
    Premix mine(c);
    const Layout layout = c.seed % 2 == 0 ? Layout::kBhsd : Layout::kBshd;
    Premix wide = float64(c, mine);
    run_both(wide, layout, Backend::kReference, [] { return std::make_unique<HostPlace>(1, true); });
    run_both(mine, layout, target->backend(), [&] { return target->mirror({.misaligned = c.seed % 5 == 0}); });
    const PremixTensors &t = mine.tensors, &e = wide.tensors;
    const double bar = named.slack * bars_of(p.dtype).out;
    const std::string name = target->name();
    expect_close(name + " y", values(t.y, mine.y_shape), values(e.y, mine.y_shape), bar, 0);
    expect_close(name + " dx", values(t.dx, mine.x_shape), values(e.dx, mine.x_shape), bar, 0);
    expect_close(name + " dw", values(as_canonical(t.dw), shape_of(t.dw)), values(as_canonical(e.dw), shape_of(t.dw)),
                 weight_bar(p.dtype, p.weight_dtype, target->tensor_cores()), 0);
    expect_all_written(name + " y", mine.arena, t.y.data, mine.y_shape);
    expect_all_written(name + " dx", mine.arena, t.dx.data, mine.x_shape);
    expect_all_written(name + " dw", mine.arena, t.dw.data, shape_of(t.dw));
  }
}

void check(const Named<CollapseCase>& named) {
  const CollapseCase& c = named.problem;
  const CollapseProblem& p = c.problem;
  for (const CudaTarget* target : {&naive(), &mma()}) {
    if (!takes(*target, p, Op::kCollapseBackward)) continue;
    Collapse mine(c);
    const Layout layout = c.seed % 2 == 0 ? Layout::kBhsd : Layout::kBshd;
    Collapse wide = float64(c, mine);
    run_both(wide, false, layout, Backend::kReference, [] { return std::make_unique<HostPlace>(1, true); });
    run_both(mine, false, layout, target->backend(), [&] { return target->mirror(); });
    const CollapseTensors &t = mine.tensors, &e = wide.tensors;
    const double bar = named.slack * bars_of(p.dtype).out;
    const std::string name = target->name();
    expect_close(name + " y", values(t.y, mine.y_shape), values(e.y, mine.y_shape), bar, 0);
    expect_close(name + " dx", values(t.dx, mine.x_shape), values(e.dx, mine.x_shape), bar, 0);
    expect_close(name + " dr", values(as_canonical(t.dr), shape_of(t.dr)), values(as_canonical(e.dr), shape_of(t.dr)),
                 weight_bar(p.dtype, p.weight_dtype, target->tensor_cores()), 0);
    expect_all_written(name + " y", mine.arena, t.y.data, mine.y_shape);
    expect_all_written(name + " dx", mine.arena, t.dx.data, mine.x_shape);
    expect_all_written(name + " dr", mine.arena, t.dr.data, shape_of(t.dr));
  }
}

template <class Case>
void check_all(const std::vector<Named<Case>>& cases) {
  in_parallel(
      static_cast<int64_t>(cases.size()), [&](int64_t i) { check(cases[static_cast<size_t>(i)]); },
      [&](int64_t i) { return cases[static_cast<size_t>(i)].name; });
}

PremixCase premix_case(uint64_t seed, int64_t heads, int64_t seqlen, int64_t pseudo, int64_t dim) {
  PremixCase c;
  c.problem.batch = 2, c.problem.heads = heads, c.problem.seqlen = seqlen;
  c.problem.pseudo_heads = pseudo, c.problem.head_dim = dim;
  c.strides = std::array{Strides::kBhsd, Strides::kBshd, Strides::kRandom}[seed % 3];
  c.seed = seed;
  return c;
}

TEST(CudaPremix, SizesAndDtypes) {
  std::vector<Named<PremixCase>> cases;
  uint64_t seed = 1;
  for (const auto& [heads, seqlen, pseudo, dim] : std::initializer_list<std::array<int64_t, 4>>{{1, 1, 1, 1},
                                                                                                {3, 20, 2, 7},
                                                                                                {8, 33, 4, 64},
                                                                                                {5, 17, 3, 80},
                                                                                                {17, 5, 1, 257},
                                                                                                {2, 3, 2, 1024},
                                                                                                {4, 0, 2, 16},
                                                                                                {20, 65, 4, 128},
                                                                                                {20, 31, 2, 64},
                                                                                                {1, 100, 4, 8},
                                                                                                {16, 16, 16, 32},
                                                                                                {64, 9, 4, 64},
                                                                                                {65, 4, 2, 16},
                                                                                                {7, 129, 5, 96},
                                                                                                {32, 64, 4, 128},
                                                                                                {4, 250, 4, 128},
                                                                                                {2, 70, 17, 16},
                                                                                                {12, 40, 4, 192}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const bool fp32_weights : {true, false}) {
        PremixCase c = premix_case(seed++, heads, seqlen, pseudo, dim);
        c.problem.dtype = dtype, c.problem.weight_dtype = fp32_weights ? DType::kFloat32 : dtype;
        cases.push_back({fmt::format("{} heads N {} P {} D {} {} {}", heads, seqlen, pseudo, dim, dtype_name(dtype),
                                     dtype_name(c.problem.weight_dtype)),
                         c, dim == 1 ? 1.6 : 1.1});
      }
    }
  }
  check_all(cases);
}

TEST(CudaPremix, Rope) {
  std::vector<Named<PremixCase>> cases;
  uint64_t seed = 100;
  for (const RopeStyle style : {RopeStyle::kHalf, RopeStyle::kPairs}) {
    for (const RopeIndex index : {RopeIndex::kToken, RopeIndex::kRow}) {
      for (const int64_t rope_dim : {2, 24, 40}) {
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
          PremixCase c = premix_case(seed++, 4, 37, 3, 40);
          c.problem.dtype = dtype;
          c.problem.rope_style = style, c.problem.rope_index = index, c.problem.rope_dim = rope_dim;
          c.problem.rope_offset = 11;
          const std::string name = fmt::format("style {} index {} D_rot {} {}", static_cast<int>(style),
                                               static_cast<int>(index), rope_dim, dtype_name(dtype));
          cases.push_back({name, c, 1.3});
          c.lens = {5, 0, 30, 12}, c.tail = 4;
          cases.push_back({name + " packed", c, 1.3});
          c.other_lens = {9, 0, 31, 12};
          cases.push_back({name + " packed, longer keys", c, 1.3});
        }
      }
    }
  }
  // LLaMA's shape: every dim turns.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    PremixCase c = premix_case(seed++, 20, 130, 4, 128);
    c.problem.dtype = dtype, c.problem.rope_dim = 128;
    cases.push_back({fmt::format("20 heads P 4 D 128 {}", dtype_name(dtype)), c, 1.3});
  }
  check_all(cases);
}

TEST(CudaCollapse, BothForms) {
  std::vector<Named<CollapseCase>> cases;
  uint64_t seed = 200;
  for (const bool global : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const auto& [heads, seqlen, pseudo, dim] : std::initializer_list<std::array<int64_t, 4>>{
               {1, 1, 1, 1}, {3, 40, 2, 24}, {4, 9, 5, 130}, {2, 7, 20, 16}, {20, 65, 4, 128}, {16, 100, 2, 64}}) {
        CollapseCase c;
        c.problem.batch = 2, c.problem.heads = heads, c.problem.seqlen = seqlen;
        c.problem.pseudo_heads = pseudo, c.problem.head_dim = dim;
        c.problem.global = global, c.problem.dtype = dtype;
        c.problem.weight_dtype = seed % 2 == 0 ? DType::kFloat32 : dtype;
        c.strides = std::array{Strides::kBhsd, Strides::kBshd, Strides::kRandom}[seed % 3], c.seed = seed++;
        cases.push_back(
            {fmt::format("global {} {} heads N {} P {} D {} {}", global, heads, seqlen, pseudo, dim, dtype_name(dtype)),
             c, dim == 1 ? 1.6 : 1.1});
      }
    }
  }
  check_all(cases);
}

// Both the values and the weight gradients, which many blocks sum.
TEST(CudaPremix, BitEqualRunToRun) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    std::vector<std::vector<double>> once;
    for (int round = 0; round < 4; ++round) {
      PremixCase c = premix_case(4, 20, 300, 4, 64);
      c.problem.dtype = half_dtype(), c.problem.rope_dim = 64;
      Premix p(c);
      run_both(p, Layout::kBhsd, target->backend(), [&] { return target->mirror(); });
      const std::vector<std::vector<double>> all{values(p.tensors.y, p.y_shape), values(p.tensors.dx, p.x_shape),
                                                 values(as_canonical(p.tensors.dw), shape_of(p.tensors.dw))};
      if (round == 0) once = all;
      for (size_t i = 0; i < all.size(); ++i) {
        EXPECT_NO_THROW(expect_equal(target->name(), all[i], once[i])) << "tensor " << i;
      }
    }
  }
}

}  // namespace
}  // namespace plait::testing
