// The identities between plain, joint and interleaved attention, premix and collapse.
// Called by ctest.
#include <cmath>
#include <limits>
#include <vector>

#include "oracle.hpp"

namespace plait::testing {
namespace {

constexpr double kTolerance = 1e-13;

Attention causal_attention(HeadMode mode, int64_t pseudo_heads, uint64_t seed = 1) {
  AttentionCase c;
  c.problem = attention_problem(2, 4, 2, 3, 5, 4, 4);
  c.problem.mode = mode, c.problem.pseudo_heads = pseudo_heads, c.problem.causal = true, c.seed = seed;
  return Attention(c);
}

// Premix of `x` into `y` with W = identity for every pseudo-head.
void premix_identity(const CanonicalTensor& x, const CanonicalTensor& y, const Shape& y_shape) {
  PremixCase c;
  c.problem.batch = y_shape[0], c.problem.heads = y_shape[1], c.problem.seqlen = y_shape[2];
  c.problem.pseudo_heads = y_shape[3], c.problem.head_dim = y_shape[4];
  c.problem.dtype = c.problem.weight_dtype = DType::kFloat64;
  Premix premix(c);
  for_each_index(shape_of(premix.tensors.w), [&](const reference::Index& i) {
    reference::store(premix.tensors.w, i.seq, i.pseudo, i.dim, i.seq == i.dim ? 1.0 : 0.0);
  });
  premix.tensors.x = x, premix.tensors.y = y;
  reference::premix_forward(premix.problem, premix.tensors);
}

TEST(Identity, JointWithIdentityWeightsIsPlain) {
  for (const int64_t pseudo_heads : {1, 2, 5}) {
    Attention plain = causal_attention(HeadMode::kPlain, 1), joint = causal_attention(HeadMode::kJoint, pseudo_heads);
    premix_identity(plain.inputs.q, joint.inputs.q, joint.q_shape);
    premix_identity(plain.inputs.k, joint.inputs.k, joint.k_shape);
    premix_identity(plain.inputs.v, joint.inputs.v, joint.v_shape);
    const AttentionTensors p = plain.with_outputs(), j = joint.with_outputs();
    reference::attention_forward(plain.problem, p);
    reference::attention_forward(joint.problem, j);
    std::vector<double> lse = values(as_canonical(p.lse), plain.lse_shape);
    for (double& x : lse) x += std::log(static_cast<double>(pseudo_heads));
    expect_near(values(j.out, joint.out_shape), values(p.out, plain.out_shape), kTolerance, "out");
    expect_near(values(as_canonical(j.lse), joint.lse_shape), lse, kTolerance, "lse");
  }
}

TEST(Identity, OnePseudoHeadIsPlainInEveryMode) {
  Attention plain = causal_attention(HeadMode::kPlain, 1);
  const AttentionTensors p = run_both(plain);
  for (const HeadMode mode : {HeadMode::kJoint, HeadMode::kInterleaved}) {
    Attention other = causal_attention(mode, 1);
    copy_inputs(plain, other);
    const AttentionTensors o = run_both(other);
    CollapseCase c;
    c.problem.batch = 2, c.problem.heads = 4, c.problem.seqlen = 3, c.problem.head_dim = 4;
    c.problem.dtype = c.problem.weight_dtype = DType::kFloat64;
    Collapse collapse(c);
    for (int64_t h = 0; h < 4; ++h) reference::store(collapse.tensors.r, h, 0, 0, 1.0);
    collapse.tensors.x = o.out;
    reference::collapse_forward(collapse.problem, collapse.tensors);
    EXPECT_EQ(values(collapse.tensors.y, collapse.y_shape), values(p.out, plain.out_shape));
    EXPECT_EQ(values(as_canonical(o.lse), other.lse_shape), values(as_canonical(p.lse), plain.lse_shape));
    EXPECT_EQ(values(o.dq, other.q_shape), values(p.dq, plain.q_shape));
    EXPECT_EQ(values(o.dk, other.k_shape), values(p.dk, plain.k_shape));
    EXPECT_EQ(values(o.dv, other.v_shape), values(p.dv, plain.v_shape));
  }
}

TEST(Identity, JointIsTheMergeOfSeparateAttentions) {
  constexpr int64_t kPseudoHeads = 3;
  Attention joint = causal_attention(HeadMode::kJoint, kPseudoHeads), plain = causal_attention(HeadMode::kPlain, 1);
  const AttentionTensors j = joint.with_outputs();
  reference::attention_forward(joint.problem, j);
  std::vector<double> numerators(static_cast<size_t>(elements(plain.out_shape)));
  std::vector<double> denominators(static_cast<size_t>(elements(plain.lse_shape)));
  for (int64_t p = 0; p < kPseudoHeads; ++p) {
    AttentionTensors one = plain.with_outputs();
    one.q = j.q, one.k = j.k, one.v = j.v;
    for (CanonicalTensor* x : {&one.q, &one.k, &one.v}) {
      x->data = static_cast<double*>(x->data) + p * x->pseudo_stride;
    }
    reference::attention_forward(plain.problem, one);
    const std::vector<double> out = values(one.out, plain.out_shape);
    const std::vector<double> lse = values(as_canonical(one.lse), plain.lse_shape);
    for (size_t i = 0; i < lse.size(); ++i) denominators[i] += std::exp(lse[i]);
    for (size_t i = 0; i < out.size(); ++i) numerators[i] += std::exp(lse[i / 4]) * out[i];
  }
  for (size_t i = 0; i < numerators.size(); ++i) numerators[i] /= denominators[i / 4];
  for (double& x : denominators) x = std::log(x);
  expect_near(values(j.out, joint.out_shape), numerators, kTolerance, "out");
  expect_near(values(as_canonical(j.lse), joint.lse_shape), denominators, kTolerance, "lse");
}

// Interleaved attention without a mask on heads that agree over p: P clones of every key, P equal rows.
TEST(Identity, InterleavedClonesArePlain) {
  AttentionCase c;
  c.problem = attention_problem(1, 2, 2, 3, 4, 4, 4);
  Attention plain(c);
  c.problem.mode = HeadMode::kInterleaved, c.problem.pseudo_heads = 2;
  for (const bool token : {false, true}) {
    plain.problem.causal = c.problem.causal = token;  // the token mask keeps clones together
    c.problem.mask = token ? PseudoMask::kToken : PseudoMask::kFlat;
    Attention inter(c);
    premix_identity(plain.inputs.q, inter.inputs.q, inter.q_shape);
    premix_identity(plain.inputs.k, inter.inputs.k, inter.k_shape);
    premix_identity(plain.inputs.v, inter.inputs.v, inter.v_shape);
    const AttentionTensors p = plain.with_outputs(), i = inter.with_outputs();
    reference::attention_forward(plain.problem, p);
    reference::attention_forward(inter.problem, i);
    for_each_index(inter.out_shape, [&](const reference::Index& at) {
      EXPECT_NEAR(reference::load(i.out, at), reference::load(p.out, {at.batch, at.head, at.seq, 0, at.dim}), 1e-13);
      EXPECT_NEAR(reference::load(i.lse, at.batch, at.head, at.seq * 2 + at.pseudo),
                  reference::load(p.lse, at.batch, at.head, at.seq) + std::log(2.0), 1e-13);
    });
  }
}

}  // namespace
}  // namespace plait::testing
