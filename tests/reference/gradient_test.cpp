// Every gradient of attention against central finite differences of the forward, over modes, masks and options.
// Called by ctest.
#include <string>
#include <tuple>

#include "oracle.hpp"

namespace plait::testing {
namespace {

struct Mode {
  const char* name;
  HeadMode mode;
  PseudoMask mask;
  int64_t pseudo_heads;
};
struct Window {
  const char* name;
  bool causal;
  int64_t left, right;
};

void check(const AttentionCase& c) {
  Attention a(c);
  const AttentionTensors t = run_both(a);
  const auto loss = [&] {
    reference::attention_forward(a.problem, t);
    return weighted_sum(t.out, t.dout, a.out_shape) +
           weighted_sum(as_canonical(t.lse), as_canonical(t.dlse), a.lse_shape);
  };
  EXPECT_EQ(a.arena.written(t.dq.data), elements(a.q_shape));
  EXPECT_EQ(a.arena.written(t.dk.data), elements(a.k_shape));
  EXPECT_EQ(a.arena.written(t.dv.data), elements(a.v_shape));
  expect_gradient(t.q, t.dq, a.q_shape, loss, "dq");
  expect_gradient(t.k, t.dk, a.k_shape, loss, "dk");
  expect_gradient(t.v, t.dv, a.v_shape, loss, "dv");
  if (a.problem.has_sinks) expect_gradient(a.sinks(), a.dsinks(t), a.sinks_shape(), loss, "dsinks");
}

class Gradient : public ::testing::TestWithParam<std::tuple<Mode, Window>> {};

TEST_P(Gradient, MatchesFiniteDifferences) {
  const auto& [mode, window] = GetParam();
  uint64_t seed = 1;
  for (const double softcap : {0.0, 1.5}) {
    for (const bool sinks : {false, true}) {
      for (const bool packed : {false, true}) {
        AttentionCase c;
        c.problem = attention_problem(2, 4, 2, 4, 3, 3, 2);
        c.problem.mode = mode.mode, c.problem.mask = mode.mask, c.problem.pseudo_heads = mode.pseudo_heads;
        c.problem.causal = window.causal, c.problem.window_left = window.left, c.problem.window_right = window.right;
        c.problem.softcap = softcap, c.problem.has_sinks = sinks;
        if (packed) c.q_lens = {2, 0, 3}, c.kv_lens = {3, 2, 1}, c.q_tail = 1, c.kv_tail = 2;
        c.strides = Strides::kRandom, c.seed = seed++;
        SCOPED_TRACE("softcap " + std::to_string(softcap) + (sinks ? ", sinks" : "") + (packed ? ", packed" : ""));
        check(c);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , Gradient,
    ::testing::Combine(::testing::Values(Mode{"plain", HeadMode::kPlain, PseudoMask::kFlat, 1},
                                         Mode{"joint", HeadMode::kJoint, PseudoMask::kFlat, 3},
                                         Mode{"interleaved_flat", HeadMode::kInterleaved, PseudoMask::kFlat, 2},
                                         Mode{"interleaved_token", HeadMode::kInterleaved, PseudoMask::kToken, 2}),
                       ::testing::Values(Window{"full", false, -1, -1}, Window{"causal", true, -1, -1},
                                         Window{"window", false, 1, 1}, Window{"causal_window", true, 1, 0},
                                         Window{"future", false, -1, 1})),
    [](const ::testing::TestParamInfo<std::tuple<Mode, Window>>& param) {
      return std::string(std::get<0>(param.param).name) + "_" + std::get<1>(param.param).name;
    });

TEST(AttentionBackward, MultiQueryAndWideHeads) {
  AttentionCase c;
  c.problem = attention_problem(1, 3, 1, 2, 5, 9, 7);
  check(c);
  c.problem = attention_problem(1, 2, 2, 1, 1, 1, 1);
  check(c);
}

TEST(AttentionBackward, AbsentLseGradientIsZero) {
  AttentionCase c;
  c.problem = attention_problem(1, 2, 1, 3, 4, 3, 2);
  c.problem.has_sinks = true;
  Attention absent(c), zero(c);
  assign(as_canonical(zero.inputs.dlse), zero.lse_shape, std::vector<double>(6, 0.0));
  absent.inputs.dlse.data = nullptr;
  const AttentionTensors a = run_both(absent), z = run_both(zero);
  EXPECT_EQ(values(a.dq, absent.q_shape), values(z.dq, zero.q_shape));
  EXPECT_EQ(values(a.dk, absent.k_shape), values(z.dk, zero.k_shape));
  EXPECT_EQ(values(absent.dsinks(a), absent.sinks_shape()), values(zero.dsinks(z), zero.sinks_shape()));
}

// Context parallelism: with O and LSE of all keys, backward over each half of the keys gives that half of dk and dv,
// and parts of dq that add up.
TEST(AttentionBackward, ExternalOutAndLse) {
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    AttentionCase c;
    c.problem = attention_problem(2, 2, 1, 3, 6, 4, 3);
    c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
    Attention a(c);
    const AttentionTensors whole = run_both(a);
    std::vector<double> dq(static_cast<size_t>(elements(a.q_shape))), dk = values(whole.dk, a.k_shape);
    const AttentionTensors parts = a.with_gradients(whole);
    AttentionProblem half = a.problem;
    half.seqlen_kv = 3;
    for (int64_t begin = 0; begin < 6; begin += 3) {
      AttentionTensors t = parts;
      for (CanonicalTensor* keys : {&t.k, &t.v, &t.dk, &t.dv}) {
        keys->data = static_cast<double*>(keys->data) + begin * keys->seq_stride;
      }
      reference::attention_backward(half, t);
      const std::vector<double> part = values(t.dq, a.q_shape);
      for (size_t i = 0; i < dq.size(); ++i) dq[i] += part[i];
    }
    expect_near(dq, values(whole.dq, a.q_shape), 1e-13, "dq");
    expect_near(values(parts.dk, a.k_shape), dk, 1e-13, "dk");
    expect_near(values(parts.dv, a.v_shape), values(whole.dv, a.v_shape), 1e-13, "dv");
  }
}

TEST(AttentionBackward, ExternalLseOfMinusInfinityStopsTheRow) {
  AttentionCase c;
  c.problem = attention_problem(1, 1, 1, 2, 3, 4, 4);
  c.problem.has_sinks = true;
  Attention a(c), without(c);
  const AttentionTensors t = a.with_gradients(a.with_outputs());
  reference::attention_forward(a.problem, t);
  reference::store(t.lse, 0, 0, 1, -std::numeric_limits<double>::infinity());
  reference::attention_backward(a.problem, t);
  AttentionTensors one_row = without.with_gradients(t);
  AttentionProblem one = a.problem;
  one.seqlen_q = 1;
  reference::attention_backward(one, one_row);
  for (int64_t d = 0; d < 4; ++d) EXPECT_EQ(reference::load(t.dq, {0, 0, 1, 0, d}), 0.0);
  EXPECT_EQ(values(t.dk, a.k_shape), values(one_row.dk, a.k_shape));
  EXPECT_EQ(values(t.dv, a.v_shape), values(one_row.dv, a.v_shape));
  EXPECT_EQ(values(a.dsinks(t), a.sinks_shape()), values(without.dsinks(one_row), a.sinks_shape()));
}

}  // namespace
}  // namespace plait::testing
