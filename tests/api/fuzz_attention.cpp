// Random attention problems, all options mixed: a backend against the float64 reference on the same numbers.
// Called through fuzz.hpp.
#include "api/fuzz.hpp"

namespace plait::testing {
namespace {

struct Chosen {
  AttentionCase problem;
  AttentionOptions options;
  int32_t workers = 1;
  bool sequential = false, dlse = false,
       external = false;  // external: out and lse of the backward are not those of the forward
};

void choose_sizes(Random& random, AttentionProblem& p, AttentionCase& c) {
  p.heads_kv = random.between(1, 3);
  p.heads_q = p.heads_kv * random.pick<int64_t>({1, 1, 2, 3, 4});
  p.head_dim = random.head_dim();
  p.head_dim_v = random.chance(60) ? p.head_dim : random.head_dim();
  p.mode = random.pick({HeadMode::kPlain, HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved});
  if (p.mode != HeadMode::kPlain) p.pseudo_heads = random.between(1, 4);
  p.batch = random.between(1, 3);
  // Multiply-adds of the reference; a few cases are ten times as large.
  double budget = random.chance(10) ? 2e7 : 2e6;
  budget /= static_cast<double>(p.batch * p.heads_q * (p.head_dim + p.head_dim_v));
  budget /= static_cast<double>(p.mode == HeadMode::kInterleaved ? p.pseudo_heads * p.pseudo_heads : p.pseudo_heads);
  const auto shorten = [&](int64_t& q, int64_t& kv) {
    while (static_cast<double>(q) * static_cast<double>(kv) > budget) (q > kv ? q : kv) /= 2;
  };
  const auto lengths = [&](int64_t& q, int64_t& kv) {
    q = random.length(random.chance(25) ? 4 : 300);
    kv = random.chance(25) ? q : random.length(random.chance(20) ? 2000 : 400);
    shorten(q, kv);
  };
  if (random.chance(40)) {
    for (int64_t i = 0; i < p.batch; ++i) {
      int64_t q = 0, kv = 0;
      lengths(q, kv);
      c.q_lens.push_back(static_cast<int32_t>(q)), c.kv_lens.push_back(static_cast<int32_t>(kv));
    }
    c.q_tail = random.between(0, 3), c.kv_tail = random.between(0, 3);
  } else {
    lengths(p.seqlen_q, p.seqlen_kv);
    if (random.chance(3)) p.batch = 0;
  }
}

int64_t choose_window(Random& random) {
  const int64_t huge = random.pick<int64_t>({1 << 20, int64_t{1} << 50, INT64_MAX});
  return random.pick<int64_t>({-1, -1, 0, 1, random.between(0, 40), random.between(0, 300), 127, 128, huge});
}

Chosen choose(uint64_t seed, const Target& target) {
  Random random(seed, target.tensor_cores());
  Chosen chosen;
  chosen.workers = static_cast<int32_t>(random.between(1, 5));
  chosen.sequential = random.chance(20), chosen.dlse = random.chance(60), chosen.external = random.chance(30);
  AttentionCase& c = chosen.problem;
  AttentionProblem& p = c.problem;
  AttentionOptions& o = chosen.options;
  choose_sizes(random, p, c);
  p.dtype = random.dtype();
  p.causal = o.causal = random.chance(50);
  if (random.chance(50)) {
    p.window_left = o.window_left = choose_window(random);
    p.window_right = o.window_right = choose_window(random);
  }
  if (p.mode == HeadMode::kInterleaved && random.chance(50)) p.mask = o.mask = PseudoMask::kToken;
  if (random.chance(30)) o.scale = random.pick({0.0, -0.3, 0.05, random.uniform(0.02, 0.5)});
  if (random.chance(30)) o.softcap = random.pick({0.5, 5.0, 30.0});
  p.softcap = o.softcap;
  p.has_sinks = random.chance(35);
  o.mode = p.mode;
  o.layout = random.pick({Layout::kBhsd, Layout::kBshd});
  o.deterministic = random.chance(50);
  o.strategy = random.pick({Strategy::kAuto, Strategy::kSplitQ, Strategy::kSplitKv});
  if (o.strategy != Strategy::kSplitQ && random.chance(50)) {
    o.split_size = random.pick<int64_t>({1, 7, 64, 100, 128, 333, INT64_MAX});
  }
  const bool splits = target.splits() && !(target.tensor_cores() && !c.q_lens.empty());  // tensor cores: not if packed
  if (!splits) o.split_size = 0, o.strategy = random.pick({Strategy::kAuto, Strategy::kSplitQ});
  o.backend = target.backend();
  c.out_float32 = p.dtype != DType::kFloat32 && random.chance(40);
  if (c.out_float32) o.out_dtype = DType::kFloat32;
  c.scale = o.scale;
  c.strides = random.strides();
  c.expanded = random.chance(15);
  c.q_gain = random.pick({1.0, 1.0, 4.0, 0.01});
  c.seed = random.seed();
  return chosen;
}

// out and lse as a merge over more keys would give them; some rows are empty, as far as lse says.
void make_external(const Attention& a, const AttentionTensors& t, uint64_t seed) {
  Random random(seed);
  for_each_index(a.lse_shape, [&](const reference::Index& i) {
    const double lse = reference::load(t.lse, i.batch, i.head, i.seq);
    const double moved = random.chance(5) ? -HUGE_VAL : lse + random.uniform(-0.5, 3.0);
    reference::store(t.lse, i.batch, i.head, i.seq, moved);
  });
  for_each_index(a.out_shape, [&](const reference::Index& i) {
    reference::store(t.out, i, reference::load(t.out, i) + random.uniform(-0.5, 0.5));
  });
}

// How far fp32 arithmetic may carry each result, from the sizes of what is summed; on tensor cores also the rounding of
// probabilities and dS to the input dtype.
struct Bars {
  double out, lse, dq, dk, dv, dsinks;

  Bars(const Attention& a, const Chosen& chosen, bool tensor_cores) {
    const AttentionProblem& p = a.problem;
    const double dims = std::sqrt(static_cast<double>(p.head_dim)),
                 dims_v = std::sqrt(static_cast<double>(p.head_dim_v));
    const double scale = std::abs(p.scale), gain = chosen.problem.q_gain;
    const double logit = 1 + 3 * scale * gain * dims;  // rounding of a score of this size
    const double ds = 2 * logit * (dims_v + 1);        // dP and delta
    const double lanes = std::sqrt(1.0 + static_cast<double>(p.seqlen_q * p.rows_per_position() * p.heads_q));
    constexpr double kEpsilon = 3e-6;
    const double p_sum = chosen.external ? 2 : 1;
    out = kEpsilon * logit;
    lse = kEpsilon * logit;
    dq = kEpsilon * p_sum * scale * ds;
    dk = kEpsilon * p_sum * scale * gain * ds * lanes;
    dv = kEpsilon * p_sum * logit * lanes;
    dsinks = kEpsilon * p_sum * ds * lanes * static_cast<double>(p.batch + 1);
    if (!tensor_cores) return;
    // A fp32 dout is rounded to the input dtype first.
    const double products = (p.out_dtype != p.dtype ? 12 : 4) * roundoff(p.dtype) * p_sum;
    out += products;
    dv += products * lanes;
    dq += products * scale * (dims_v + 1);
    dk += products * scale * gain * (dims_v + 1) * lanes;
  }
};

}  // namespace

void fuzz_attention(uint64_t seed, const Target& target) {
  const Chosen chosen = choose(seed, target);
  Attention a(chosen.problem);
  Wide wide(chosen.problem, chosen.options, a);
  const Bars bars(a, chosen, target.tensor_cores());
  HostPlace host(1, true);
  const auto place = [&] { return target.place(chosen.workers, chosen.sequential); };
  AttentionTensors got = a.with_outputs(), expected = wide.a.with_outputs();
  run(*place(), arguments(a, chosen.options), outputs(a, got, chosen.options));
  run(host, arguments(wide.a, wide.options), outputs(wide.a, expected, wide.options));
  const auto lse_values = [&](const AttentionTensors& t) { return values(as_canonical(t.lse), a.lse_shape); };
  expect_near("lse", lse_values(got), lse_values(expected), DType::kFloat32, bars.lse);
  expect_near("out", values(got.out, a.out_shape), values(expected.out, a.out_shape), a.problem.out_dtype, bars.out);
  expect_written("out", a.arena, got.out.data, elements(a.out_shape));
  expect_written("lse", a.arena, got.lse.data, elements(a.lse_shape));

  if (chosen.external) make_external(a, got, seed);
  copy_values(got.out, expected.out, a.out_shape);
  copy_values(as_canonical(got.lse), as_canonical(expected.lse), a.lse_shape);
  got = a.with_gradients(got), expected = wide.a.with_gradients(expected);
  run(*place(), backward_arguments(a, got, chosen.options, chosen.dlse), gradients(a, got, chosen.options));
  run(host, backward_arguments(wide.a, expected, wide.options, chosen.dlse), gradients(wide.a, expected, wide.options));
  const DType dtype = a.problem.dtype;
  expect_near("dq", values(got.dq, a.q_shape), values(expected.dq, a.q_shape), dtype, bars.dq);
  expect_near("dk", values(got.dk, a.k_shape), values(expected.dk, a.k_shape), dtype, bars.dk);
  expect_near("dv", values(got.dv, a.v_shape), values(expected.dv, a.v_shape), dtype, bars.dv);
  expect_written("dq", a.arena, got.dq.data, elements(a.q_shape));
  expect_written("dk", a.arena, got.dk.data, elements(a.k_shape));
  expect_written("dv", a.arena, got.dv.data, elements(a.v_shape));
  if (!a.problem.has_sinks) return;
  expect_near("dsinks", values(a.dsinks(got), a.sinks_shape()), values(wide.a.dsinks(expected), a.sinks_shape()),
              DType::kFloat32, bars.dsinks);
  expect_written("dsinks", a.arena, got.dsinks, a.problem.heads_q);
}

}  // namespace plait::testing
