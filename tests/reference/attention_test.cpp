// Attention against numbers worked out by hand, and its edges: empty problems, masked rows, packing, layouts, dtypes.
// Called by ctest.
#include <limits>
#include <vector>

#include "oracle.hpp"

namespace plait::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kLn2 = std::log(2.0);

// q = (1, 2), k = (0, ln 2), v = (3, 6), scale 1: scores (0, ln 2) and (0, ln 4).
Attention two_by_two(bool causal, bool sinks, double softcap = 0.0) {
  AttentionCase c;
  c.problem = attention_problem(1, 1, 1, 2, 2, 1, 1);
  c.problem.causal = causal, c.problem.has_sinks = sinks, c.problem.softcap = softcap, c.scale = 1.0;
  Attention a(c);
  assign(a.inputs.q, a.q_shape, {1.0, 2.0});
  assign(a.inputs.k, a.k_shape, {0.0, kLn2});
  assign(a.inputs.v, a.v_shape, {3.0, 6.0});
  assign(a.inputs.dout, a.out_shape, {1.0, 0.0});
  assign(as_canonical(a.inputs.dlse), a.lse_shape, {0.0, 0.0});
  if (sinks) assign(a.sinks(), a.sinks_shape(), {std::log(3.0)});
  return a;
}

TEST(Attention, TwoByTwoByHand) {
  Attention a = two_by_two(false, false);
  const AttentionTensors t = run_both(a);
  expect_near(values(t.out, a.out_shape), {5.0, 5.4}, 1e-15, "out");  // (3 + 2 * 6) / 3, (3 + 4 * 6) / 5
  expect_near(values(as_canonical(t.lse), a.lse_shape), {std::log(3.0), std::log(5.0)}, 1e-15, "lse");
  expect_near(values(t.dv, a.v_shape), {1.0 / 3, 2.0 / 3}, 1e-15, "dv");
  expect_near(values(t.dk, a.k_shape), {-2.0 / 3, 2.0 / 3}, 1e-15, "dk");  // (1/3)(3 - 5), (2/3)(6 - 5)
  expect_near(values(t.dq, a.q_shape), {2.0 / 3 * kLn2, 0.0}, 1e-15, "dq");
}

TEST(Attention, TwoByTwoCausalByHand) {
  Attention a = two_by_two(true, false);
  const AttentionTensors t = run_both(a);
  expect_near(values(t.out, a.out_shape), {3.0, 5.4}, 1e-15, "out");
  expect_near(values(as_canonical(t.lse), a.lse_shape), {0.0, std::log(5.0)}, 1e-15, "lse");
  expect_near(values(t.dv, a.v_shape), {1.0, 0.0}, 1e-15, "dv");
  expect_near(values(t.dq, a.q_shape), {0.0, 0.0}, 1e-15, "dq");
}

TEST(Attention, TwoByTwoSinkByHand) {
  Attention a = two_by_two(false, true);
  const AttentionTensors t = run_both(a);
  expect_near(values(t.out, a.out_shape), {2.5, 27.0 / 8}, 1e-15, "out");  // denominators 3 + 3 and 5 + 3
  expect_near(values(as_canonical(t.lse), a.lse_shape), {std::log(6.0), std::log(8.0)}, 1e-15, "lse");
  expect_near(values(a.dsinks(t), a.sinks_shape()), {-0.5 * 2.5}, 1e-15, "dsinks");
}

TEST(Attention, SoftcapByHand) {
  Attention a = two_by_two(false, false, 2.0);
  const AttentionTensors t = run_both(a);
  const double capped = 2.0 * std::tanh(kLn2 / 2.0);  // 2/3: tanh(x/2) = (e^x - 1) / (e^x + 1)
  EXPECT_NEAR(capped, 2.0 / 3, 1e-15);
  EXPECT_NEAR(reference::load(t.lse, 0, 0, 0), std::log(1.0 + std::exp(2.0 / 3)), 1e-15);
  const double p = std::exp(2.0 / 3) / (1.0 + std::exp(2.0 / 3));
  EXPECT_NEAR(reference::load(t.dk, {0, 0, 1, 0, 0}), p * (6.0 - 3.0 - 3.0 * p) * (1.0 - 1.0 / 9), 1e-14);
}

TEST(Attention, LargeLogitsStayFinite) {
  Attention a = two_by_two(false, false);
  assign(a.inputs.k, a.k_shape, {1e4, 2e4});
  const AttentionTensors t = run_both(a);
  EXPECT_EQ(values(t.out, a.out_shape), (std::vector<double>{6.0, 6.0}));
  EXPECT_EQ(values(as_canonical(t.lse), a.lse_shape), (std::vector<double>{2e4, 4e4}));
}

TEST(Attention, FullyMaskedRows) {
  for (const bool sinks : {false, true}) {
    AttentionCase c;
    c.problem = attention_problem(1, 2, 1, 5, 2, 3, 4);
    c.problem.causal = true, c.problem.has_sinks = sinks;
    Attention a(c);
    const AttentionTensors t = run_both(a);
    for (int64_t head = 0; head < 2; ++head) {
      const double sink = sinks ? reference::load(a.sinks(), {0, 0, head, 0, 0}) : -kInfinity;
      double dsink = 0.0;
      for (int64_t row = 0; row < 5; ++row) {
        EXPECT_EQ(reference::load(t.lse, 0, head, row) == sink, row < 3);
        for (int64_t d = 0; d < 4; ++d) EXPECT_EQ(reference::load(t.out, {0, head, row, 0, d}) == 0.0, row < 3);
        for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(reference::load(t.dq, {0, head, row, 0, d}) == 0.0, row < 3);
        double delta = -reference::load(t.dlse, 0, head, row);
        for (int64_t d = 0; d < 4; ++d) {
          delta += reference::load(t.dout, {0, head, row, 0, d}) * reference::load(t.out, {0, head, row, 0, d});
        }
        dsink -= std::exp(sink - reference::load(t.lse, 0, head, row)) * delta;  // row < 3: + dlse
      }
      if (!sinks) continue;
      EXPECT_NEAR(reference::load(a.dsinks(t), {0, 0, head, 0, 0}), dsink, 1e-14);
    }
  }
}

TEST(Attention, SinkOfMinusInfinityIsNoSink) {
  AttentionCase c;
  c.problem = attention_problem(1, 1, 1, 3, 2, 2, 2);
  c.problem.causal = true;
  Attention plain(c);
  c.problem.has_sinks = true;
  Attention sinking(c);
  copy_inputs(plain, sinking);
  assign(sinking.sinks(), sinking.sinks_shape(), {-kInfinity});
  const AttentionTensors p = run_both(plain), s = run_both(sinking);
  EXPECT_EQ(values(p.out, plain.out_shape), values(s.out, plain.out_shape));
  EXPECT_EQ(values(as_canonical(p.lse), plain.lse_shape), values(as_canonical(s.lse), plain.lse_shape));
  EXPECT_EQ(values(p.dq, plain.q_shape), values(s.dq, plain.q_shape));
  EXPECT_EQ(values(sinking.dsinks(s), sinking.sinks_shape()), std::vector<double>{0.0});
}

TEST(Attention, EmptyProblems) {
  struct Sizes {
    int64_t batch, heads_q, heads_kv, seqlen_q, seqlen_kv;
  };
  for (const Sizes& s : {Sizes{2, 2, 1, 3, 0}, Sizes{2, 2, 1, 0, 3}, Sizes{0, 2, 1, 3, 3}, Sizes{2, 0, 1, 3, 3},
                         Sizes{2, 0, 0, 3, 3}, Sizes{1, 2, 1, 0, 0}}) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
      AttentionCase c;
      c.problem = attention_problem(s.batch, s.heads_q, s.heads_kv, s.seqlen_q, s.seqlen_kv, 2, 3);
      c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
      c.problem.has_sinks = true;
      Attention a(c);
      const AttentionTensors t = run_both(a);
      for (const double x : values(t.out, a.out_shape)) EXPECT_EQ(x, 0.0);
      for (const double x : values(t.dq, a.q_shape)) EXPECT_EQ(x, 0.0);
      for (const double x : values(t.dk, a.k_shape)) EXPECT_EQ(x, 0.0);
      for (const double x : values(t.dv, a.v_shape)) EXPECT_EQ(x, 0.0);
      std::vector<double> dsinks(static_cast<size_t>(s.heads_q));
      for_each_index(a.lse_shape, [&](const reference::Index& i) {
        EXPECT_EQ(reference::load(t.lse, i.batch, i.head, i.seq), reference::load(a.sinks(), {0, 0, i.head, 0, 0}));
        dsinks[static_cast<size_t>(i.head)] += reference::load(t.dlse, i.batch, i.head, i.seq);
      });
      expect_near(values(a.dsinks(t), a.sinks_shape()), dsinks, 1e-14, "dsinks");
    }
  }
}

// One sequence of a packed problem, as a dense problem on the same memory.
AttentionTensors one_sequence(const AttentionProblem& packed, const AttentionTensors& t, int64_t index) {
  AttentionTensors one = t;
  const int64_t q_begin = t.cu_seqlens_q[index], kv_begin = t.cu_seqlens_kv[index];
  const auto move = [](auto& tensor, int64_t elements) { tensor.data = static_cast<double*>(tensor.data) + elements; };
  for (CanonicalTensor* x : {&one.q, &one.out, &one.dout, &one.dq}) move(*x, q_begin * x->seq_stride);
  for (CanonicalTensor* x : {&one.k, &one.v, &one.dk, &one.dv}) move(*x, kv_begin * x->seq_stride);
  for (RowTensor* x : {&one.lse, &one.dlse}) move(*x, q_begin * packed.rows_per_position() * x->row_stride);
  one.cu_seqlens_q = one.cu_seqlens_kv = nullptr;
  return one;
}

void expect_packed_equals_single_calls(const AttentionCase& c) {
  Attention a(c);
  const AttentionTensors packed = run_both(a), each = a.with_gradients(a.with_outputs());
  EXPECT_EQ(a.arena.written(packed.out.data), elements(a.out_shape));
  EXPECT_EQ(a.arena.written(packed.lse.data), elements(a.lse_shape));
  std::vector<double> dsinks(4);
  for (int64_t index = 0; index < a.problem.batch; ++index) {
    AttentionProblem dense = a.problem;
    dense.packed = false, dense.batch = 1;
    dense.seqlen_q = c.q_lens[static_cast<size_t>(index)], dense.seqlen_kv = c.kv_lens[static_cast<size_t>(index)];
    const AttentionTensors one = one_sequence(a.problem, each, index);
    reference::attention_forward(dense, one);
    reference::attention_backward(dense, one);
    const std::vector<double> part = values(a.dsinks(one), a.sinks_shape());
    for (size_t head = 0; head < dsinks.size(); ++head) dsinks[head] += part[head];
  }
  const auto compare = [](const CanonicalTensor& got, const CanonicalTensor& expected, Shape shape, int64_t tail,
                          double past) {
    for_each_index(shape, [&](const reference::Index& i) {
      const double value = i.seq < shape[2] - tail ? reference::load(expected, i) : past;
      EXPECT_EQ(reference::load(got, i), value);
    });
  };
  const int64_t lse_tail = 2 * a.problem.rows_per_position();
  compare(packed.out, each.out, a.out_shape, 2, 0.0);
  compare(as_canonical(packed.lse), as_canonical(each.lse), a.lse_shape, lse_tail, -kInfinity);
  compare(packed.dq, each.dq, a.q_shape, 2, 0.0);
  compare(packed.dk, each.dk, a.k_shape, 1, 0.0);
  compare(packed.dv, each.dv, a.v_shape, 1, 0.0);
  expect_near(values(a.dsinks(packed), a.sinks_shape()), dsinks, 1e-14, "dsinks");
}

TEST(Attention, PackedEqualsOneCallPerSequence) {
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    AttentionCase c;
    c.problem = attention_problem(0, 4, 2, 0, 0, 3, 2);
    c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
    c.problem.causal = true, c.problem.has_sinks = true;
    c.q_lens = {3, 0, 5, 2, 0}, c.kv_lens = {4, 2, 3, 0, 0}, c.q_tail = 2, c.kv_tail = 1;
    c.strides = Strides::kRandom;
    expect_packed_equals_single_calls(c);
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      c.q_lens = random_lengths(seed, 6, 7), c.kv_lens = random_lengths(seed + 100, 6, 7), c.seed = seed;
      expect_packed_equals_single_calls(c);
    }
  }
}

TEST(Attention, ResultsDependOnValuesNotOnStrides) {
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    AttentionCase c;
    c.problem = attention_problem(2, 4, 2, 3, 4, 3, 2);
    c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 3, c.problem.has_sinks = true;
    c.expanded = true, c.strides = Strides::kRandom;
    Attention expanded(c);
    c.expanded = false;
    for (const Strides strides : {Strides::kBhsd, Strides::kBshd, Strides::kRandom}) {
      c.strides = strides;
      Attention other(c);
      copy_inputs(expanded, other);
      const AttentionTensors e = run_both(expanded), o = run_both(other);
      EXPECT_EQ(values(e.out, expanded.out_shape), values(o.out, other.out_shape));
      EXPECT_EQ(values(as_canonical(e.lse), expanded.lse_shape), values(as_canonical(o.lse), other.lse_shape));
      EXPECT_EQ(values(e.dq, expanded.q_shape), values(o.dq, other.q_shape));
      EXPECT_EQ(values(e.dk, expanded.k_shape), values(o.dk, other.k_shape));
      EXPECT_EQ(values(e.dv, expanded.v_shape), values(o.dv, other.v_shape));
      EXPECT_EQ(values(expanded.dsinks(e), expanded.sinks_shape()), values(other.dsinks(o), other.sinks_shape()));
      EXPECT_EQ(other.arena.written(o.out.data), elements(other.out_shape));
    }
  }
}

TEST(Attention, LowPrecisionIsFloat64RoundedOnce) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const bool out_float32 : {false, true}) {
      AttentionCase c;
      c.problem = attention_problem(1, 2, 1, 4, 5, 6, 3);
      c.problem.causal = true;
      Attention wide(c);
      c.problem.dtype = dtype, c.out_float32 = out_float32;
      Attention narrow(c);
      copy_inputs(narrow, wide);
      const AttentionTensors w = wide.with_gradients(wide.with_outputs());
      const AttentionTensors n = narrow.with_gradients(narrow.with_outputs());
      reference::attention_forward(wide.problem, w);
      reference::attention_forward(narrow.problem, n);
      const auto rounded = [](std::vector<double> all, DType to) {
        double slot = 0.0;
        for (double& x : all) reference::store(&slot, to, 0, x), x = reference::load(&slot, to, 0);
        return all;
      };
      EXPECT_EQ(values(n.out, narrow.out_shape),
                rounded(values(w.out, wide.out_shape), out_float32 ? DType::kFloat32 : dtype));
      EXPECT_EQ(values(as_canonical(n.lse), narrow.lse_shape),
                rounded(values(as_canonical(w.lse), wide.lse_shape), DType::kFloat32));
      assign(w.out, wide.out_shape, values(n.out, narrow.out_shape));
      assign(as_canonical(w.lse), wide.lse_shape, values(as_canonical(n.lse), narrow.lse_shape));
      reference::attention_backward(wide.problem, w);
      reference::attention_backward(narrow.problem, n);
      EXPECT_EQ(values(n.dq, narrow.q_shape), rounded(values(w.dq, wide.q_shape), dtype));
      EXPECT_EQ(values(n.dk, narrow.k_shape), rounded(values(w.dk, wide.k_shape), dtype));
      EXPECT_EQ(values(n.dv, narrow.v_shape), rounded(values(w.dv, wide.v_shape), dtype));
    }
  }
}

}  // namespace
}  // namespace plait::testing
