// What the CUDA backends promise beside accuracy: bit-equality, poison that stays where no row looks, refusals, empty
// problems, the gradients of merge_states.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "catalog/catalog.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

void for_each_target(DType dtype, int64_t dim, const std::function<void(const CudaTarget&)>& body) {
  body(naive());
  if (tensor_cores_take(dtype, dim, dim)) body(mma());
}

// Forward always; gradients with deterministic = true. Many blocks share each gradient row here.
TEST(CudaBehaviour, BitEqualRunToRun) {
  std::vector<GpuCase> cases;
  for (const DType dtype : kDtypes) {
    for (const int64_t dim : {32, 64, 96, 128, 192, 256, 80, 40, 320, 1000}) {
      for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
        GpuCase c;
        c.problem.problem = sizes(1, 8, 2, 300, 400, dim, dim);
        AttentionProblem& p = c.problem.problem;
        p.dtype = dtype, p.mode = mode, p.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
        p.causal = true, p.has_sinks = true, p.deterministic = true;
        c.name = fmt::format("{} D {} mode {}", dtype_name(dtype), dim, static_cast<int>(mode));
        cases.push_back(c);
      }
    }
  }
  in_parallel(
      static_cast<int64_t>(cases.size()),
      [&](int64_t i) {
        const GpuCase& c = cases[static_cast<size_t>(i)];
        for_each_target(c.problem.problem.dtype, c.problem.problem.head_dim, [&](const CudaTarget& target) {
          const auto once = results_of(c, target);
          for (int round = 0; round < 2; ++round) {
            const auto again = results_of(c, target);
            for (size_t t = 0; t < once.size(); ++t)
              expect_equal(fmt::format("{} {}", target.name(), t), again[t], once[t]);
          }
        });
      },
      [&](int64_t i) { return cases[static_cast<size_t>(i)].name; });
}

// With a fixed split_size a sequence's bits do not depend on the batch; without one they repeat from run to run.
void check_fixed_splits(const CudaTarget& target, int64_t queries) {
  for (const int64_t split_size : {0, 1, 48, 64, 1000}) {
    AttentionCase c;
    c.problem = sizes(5, 8, 2, queries, 700, 64, 64);
    c.problem.dtype = DType::kFloat16, c.problem.causal = true, c.problem.has_sinks = true;
    Attention a(c);
    AttentionOptions options = options_of(c, target.backend(), Layout::kBhsd);
    options.strategy = Strategy::kSplitKv, options.split_size = split_size;
    const auto result = [&](AttentionArgs args, int64_t first, int64_t batch) {
      const AttentionTensors t = a.with_outputs();
      AttentionOutputs out = outputs(a, t, options);
      for (TensorView* view : {&args.q, &args.k, &args.v, &out.out, &out.lse}) {
        view->data = static_cast<char*>(view->data) + first * view->stride[0] * dtype_bytes(view->dtype);
        view->shape[0] = batch;
      }
      run(*target.mirror(), args, out);
      Shape shape = a.out_shape;
      shape[0] = batch;
      CanonicalTensor of = t.out;
      of.data = out.out.data;
      return values(of, shape);
    };
    const std::vector<double> all = result(arguments(a, options), 0, 5);
    expect_equal("again", result(arguments(a, options), 0, 5), all);
    if (split_size == 0) continue;
    const size_t one = all.size() / 5;
    for (int64_t b = 0; b < 5; ++b) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(one) * b;
      expect_equal("alone", result(arguments(a, options), b, 1), {begin, begin + static_cast<std::ptrdiff_t>(one)});
    }
  }
}

TEST(CudaBehaviour, FixedSplitsDoNotDependOnTheBatch) {
  if (!tensor_cores_take(DType::kFloat16, 64, 64)) GTEST_SKIP() << "not built";
  check_fixed_splits(mma(), 3);
  check_fixed_splits(automatic(), 3);
  check_fixed_splits(automatic(), 130);
  if (catalog::kSm90 && sm90().device().compute_capability == catalog::kHopper) check_fixed_splits(sm90(), 130);
}

// Keys that no row sees hold NaN, beside keys that rows do see. dq is not looked at: on tensor cores a NaN that stands
// in a tile of visible keys reaches it (docs/numerics.md).
TEST(CudaBehaviour, KeysOutsideEveryIntervalNeverCount) {
  for (const DType dtype : kDtypes) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint}) {
      AttentionCase c;
      c.problem = sizes(1, 2, 1, 10, 600, 64, 64);
      c.problem.dtype = dtype, c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
      c.problem.window_left = 5, c.problem.window_right = 3;  // the rows see keys 585 to 599
      for_each_target(dtype, 64, [&](const CudaTarget& target) {
        const auto results = [&](bool poisoned) {
          Attention a(c);
          for (const CanonicalTensor& t : {a.inputs.k, a.inputs.v}) {
            for_each_index(a.k_shape, [&](const reference::Index& i) {
              if (i.seq < 585 && poisoned) reference::store(t, i, NAN);
            });
          }
          const AttentionOptions options = options_of(c, target.backend(), Layout::kBhsd);
          const AttentionTensors forward = a.with_outputs();
          run(*target.mirror(), arguments(a, options), outputs(a, forward, options));
          const AttentionTensors t = a.with_gradients(forward);
          run(*target.mirror(), backward_arguments(a, t, options, true), gradients(a, t, options));
          return std::array{values(t.out, a.out_shape), values(t.dv, a.v_shape), values(t.dk, a.k_shape)};
        };
        const auto clean = results(false), poisoned = results(true);
        for (size_t i = 0; i < clean.size(); ++i) {
          EXPECT_NO_THROW(expect_close(target.name(), poisoned[i], clean[i], 1e-6, 0)) << "tensor " << i;
        }
      });
    }
  }
}

TEST(CudaBehaviour, NoLseGradientIsZeroLseGradient) {
  for (const DType dtype : kDtypes) {
    for_each_target(dtype, 64, [&](const CudaTarget& target) {
      GpuCase c;
      c.problem.problem = sizes(2, 4, 2, 90, 120, 64, 64);
      c.problem.problem.dtype = dtype, c.problem.problem.deterministic = true, c.problem.problem.has_sinks = true;
      Attention a(c.problem);
      for_each_index(a.lse_shape,
                     [&](const reference::Index& i) { reference::store(a.inputs.dlse, i.batch, i.head, i.seq, 0.0); });
      const AttentionOptions options = options_of(c.problem, target.backend(), Layout::kBhsd);
      const AttentionTensors forward = a.with_outputs();
      run(*target.mirror(), arguments(a, options), outputs(a, forward, options));
      std::vector<std::vector<double>> results;
      for (const bool dlse : {true, false}) {
        const AttentionTensors t = a.with_gradients(forward);
        run(*target.mirror(), backward_arguments(a, t, options, dlse), gradients(a, t, options));
        results.push_back(values(t.dq, a.q_shape));
      }
      EXPECT_NO_THROW(expect_equal(target.name(), results[1], results[0]));
    });
  }
}

// B, heads, Sq or Sk of 0: everything that exists is written; the reference says what.
TEST(CudaBehaviour, EmptyProblems) {
  std::vector<GpuCase> cases;
  for (const DType dtype : kDtypes) {
    for (const auto& [batch, heads, q, k] : std::initializer_list<std::array<int64_t, 4>>{
             {0, 2, 5, 7}, {2, 0, 5, 7}, {2, 2, 0, 7}, {2, 2, 5, 0}, {0, 0, 0, 0}}) {
      for (const bool sinks : {false, true}) {
        GpuCase c;
        c.name = fmt::format("{} B {} H {} Sq {} Sk {} sinks {}", dtype_name(dtype), batch, heads, q, k, sinks);
        c.problem.problem = sizes(batch, heads, heads, q, k, 64, 64);
        c.problem.problem.dtype = dtype, c.problem.problem.has_sinks = sinks;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

TEST(CudaBehaviour, WhatTensorCoresCannotTakeIsRefusedByName) {
  for (const auto& [dtype, dim] : std::initializer_list<std::pair<DType, int64_t>>{
           {DType::kFloat32, 64}, {DType::kFloat16, 65}, {DType::kBFloat16, 265}}) {
    AttentionCase c;
    c.problem = sizes(1, 2, 1, 8, 8, dim, dim);
    c.problem.dtype = dtype;
    Attention a(c);
    const AttentionTensors t = a.with_outputs();
    for (const Backend backend : {Backend::kCudaMma, Backend::kCpu, Backend::kReference}) {
      const AttentionOptions options = options_of(c, backend, Layout::kBhsd);
      try {
        run(*mma().mirror(), arguments(a, options), outputs(a, t, options));
        ADD_FAILURE() << backend_name(backend) << " took " << dtype_name(dtype) << " " << dim;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
        EXPECT_EQ(error.argument(), "backend") << error.what();
      }
    }
    // auto finds the backend that takes it.
    const AttentionOptions options = options_of(c, Backend::kAuto, Layout::kBhsd);
    const auto place = naive().mirror();
    EXPECT_EQ(plan_attention_forward(in(*place, arguments(a, options)), place->device()).backend, Backend::kCudaNaive);
  }
}

TEST(CudaBehaviour, TensorsOfTwoDevicesAreRefused) {
  AttentionCase c;
  c.problem = sizes(1, 2, 1, 8, 8, 64, 64);
  Attention a(c);
  const auto place = naive().mirror();
  AttentionArgs args = in(*place, arguments(a, options_of(c, Backend::kAuto, Layout::kBhsd)));
  args.k = arguments(a, args.options).k;  // on the host
  EXPECT_THROW(plan_attention_forward(args, place->device()), Error);
}

// The CPU's gradients are checked by finite differences (tests/api/merge_test.cpp).
TEST(CudaBehaviour, MergeBackwardEqualsTheCpu) {
  for (const DType dtype : kDtypes) {
    for (const Strides strides : {Strides::kBhsd, Strides::kBshd, Strides::kRandom}) {
      const Shape shape{2, 3, 37, 1, 40}, lse_shape{2, 3, 37, 1, 1};
      Arena arena(7, strides);
      std::vector<TensorView> outs, lses;
      for (int part = 0; part < 3; ++part) {
        outs.push_back(view_of(arena.random(dtype, shape, 37), shape, Layout::kBhsd, false, false));
        const RowTensor lse = arena.rows(DType::kFloat32, 2, 3, 37, 37);
        for (int64_t row = part; row < 37; row += 5) reference::store(lse, 0, 1, row, -HUGE_VAL);
        lses.push_back(view_of(lse, lse_shape, false));
      }
      const auto fresh = [&] { return view_of(arena.poisoned(dtype, shape), shape, Layout::kBhsd, false, false); };
      const auto fresh_rows = [&] { return view_of(arena.rows(DType::kFloat32, 2, 3, 37, 0), lse_shape, false); };
      const MergeArgs args{outs.data(), lses.data(), 3, Layout::kBhsd, false};
      const AttentionOutputs merged{fresh(), fresh_rows()};
      HostPlace host(2, false);
      run(host, args, merged);
      const TensorView dout = view_of(arena.random(dtype, shape, 37), shape, Layout::kBhsd, false, false);
      const std::optional<TensorView> dlse = view_of(arena.rows(DType::kFloat32, 2, 3, 37, 37), lse_shape, false);
      for (const bool with_dlse : {true, false}) {
        std::array<std::vector<TensorView>, 2> douts, dlses;
        for (size_t where = 0; where < 2; ++where) {
          for (int part = 0; part < 3; ++part) douts[where].push_back(fresh()), dlses[where].push_back(fresh_rows());
        }
        const auto maybe = with_dlse ? dlse : std::nullopt;
        run(host, args, merged, dout, maybe, douts[0], dlses[0]);
        run(*naive().mirror(), args, merged, dout, maybe, douts[1], dlses[1]);
        const auto numbers = [&](const TensorView& view, int64_t dim) {
          const CanonicalTensor t{view.data,
                                  view.dtype,
                                  view.stride[0],
                                  view.stride[1],
                                  view.stride[2],
                                  0,
                                  view.rank > 3 ? view.stride[3] : 0};
          return values(t, {2, 3, 37, 1, dim});
        };
        for (size_t part = 0; part < 3; ++part) {
          EXPECT_NO_THROW(
              expect_close("dout", numbers(douts[1][part], 40), numbers(douts[0][part], 40), bars_of(dtype).out, 0));
          EXPECT_NO_THROW(expect_close("dlse", numbers(dlses[1][part], 1), numbers(dlses[0][part], 1), 1e-5, 0));
        }
      }
    }
  }
}

}  // namespace
}  // namespace plait::testing
