// Premix, RoPE and collapse: hand-made examples, finite differences, packing.
// Called by ctest.
#include <cmath>
#include <string>
#include <vector>

#include "oracle.hpp"

namespace plait::testing {
namespace {

PremixCase premix_case(int64_t batch, int64_t heads, int64_t seqlen, int64_t pseudo_heads, int64_t head_dim) {
  PremixCase c;
  c.problem.batch = batch, c.problem.heads = heads, c.problem.seqlen = seqlen;
  c.problem.pseudo_heads = pseudo_heads, c.problem.head_dim = head_dim;
  c.problem.dtype = c.problem.weight_dtype = DType::kFloat64;
  return c;
}

TEST(Premix, ByHand) {
  Premix m(premix_case(1, 2, 1, 2, 1));
  assign(m.tensors.x, m.x_shape, {1.0, 10.0});
  assign(as_canonical(m.tensors.w), shape_of(m.tensors.w), {1, 2, 3, 4, 5, 6, 7, 8});  // w[h, p, s]
  assign(m.tensors.dy, m.y_shape, {1.0, 0.0, 0.0, 2.0});
  reference::premix_forward(m.problem, m.tensors);
  reference::premix_backward(m.problem, m.tensors);
  EXPECT_EQ(values(m.tensors.y, m.y_shape), (std::vector<double>{21, 43, 65, 87}));
  EXPECT_EQ(values(m.tensors.dx, m.x_shape), (std::vector<double>{1 + 14, 2 + 16}));
  EXPECT_EQ(values(as_canonical(m.tensors.dw), shape_of(m.tensors.dw)),
            (std::vector<double>{1, 10, 0, 0, 0, 0, 2, 20}));
}

// A quarter turn per table row: (a, b) becomes (-b, a). D_rot = 4 of 5 dims; the last never turns.
std::vector<double> quarter_turned(RopeStyle style, RopeIndex index, int64_t offset) {
  PremixCase c = premix_case(1, 1, 2, 2, 5);
  c.problem.rope_style = style, c.problem.rope_index = index, c.problem.rope_offset = offset, c.problem.rope_dim = 4;
  Premix m(c);
  assign(m.tensors.x, m.x_shape, {1, 2, 3, 4, 5, 1, 2, 3, 4, 5});
  assign(as_canonical(m.tensors.w), shape_of(m.tensors.w), {1, 1});
  for (int64_t row = 0; row < m.problem.rope_rows; ++row) {
    for (int64_t i = 0; i < 2; ++i) {
      reference::store(m.tensors.cos, row, i, 0, std::vector<double>{1, 0, -1, 0}[static_cast<size_t>(row % 4)]);
      reference::store(m.tensors.sin, row, i, 0, std::vector<double>{0, 1, 0, -1}[static_cast<size_t>(row % 4)]);
    }
  }
  reference::premix_forward(m.problem, m.tensors);
  return values(m.tensors.y, m.y_shape);  // [n, p, d]
}

std::vector<double> chain(std::initializer_list<std::vector<double>> parts) {
  std::vector<double> all;
  for (const std::vector<double>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(Rope, QuarterTurnsByHand) {
  const std::vector<double> still{1, 2, 3, 4, 5}, twice{-1, -2, -3, -4, 5};
  const std::vector<double> half{-3, -4, 1, 2, 5}, half_back{3, 4, -1, -2, 5}, pairs{-2, 1, -4, 3, 5};
  EXPECT_EQ(quarter_turned(RopeStyle::kHalf, RopeIndex::kToken, 0), chain({still, still, half, half}));
  EXPECT_EQ(quarter_turned(RopeStyle::kPairs, RopeIndex::kToken, 0), chain({still, still, pairs, pairs}));
  EXPECT_EQ(quarter_turned(RopeStyle::kHalf, RopeIndex::kToken, 1), chain({half, half, twice, twice}));
  EXPECT_EQ(quarter_turned(RopeStyle::kHalf, RopeIndex::kRow, 0), chain({still, half, twice, half_back}));
  EXPECT_EQ(quarter_turned(RopeStyle::kHalf, RopeIndex::kRow, 1), chain({twice, half_back, still, half}));
}

TEST(Rope, TurningByPositionCommutesWithTheMix) {
  for (const RopeStyle style : {RopeStyle::kHalf, RopeStyle::kPairs}) {
    PremixCase c = premix_case(2, 3, 4, 2, 6);
    c.problem.rope_dim = 4, c.problem.rope_offset = 2, c.problem.rope_style = style;
    Premix fused(c);
    reference::premix_forward(fused.problem, fused.tensors);
    PremixProblem mix_only = fused.problem, turn_only = fused.problem;
    PremixTensors mixed = fused.tensors;
    mixed.y = fused.arena.poisoned(DType::kFloat64, fused.y_shape);
    mix_only.has_rope = false;
    reference::premix_forward(mix_only, mixed);
    turn_only.pseudo_heads = 1;
    Premix identity(premix_case(1, 3, 1, 1, 1));
    assign(as_canonical(identity.tensors.w), shape_of(identity.tensors.w), {1, 0, 0, 0, 1, 0, 0, 0, 1});
    const CanonicalTensor turned = fused.arena.poisoned(DType::kFloat64, fused.y_shape);
    for (int64_t p = 0; p < 2; ++p) {
      PremixTensors t = fused.tensors;
      t.x = mixed.y, t.y = turned, t.w = identity.tensors.w;
      for (CanonicalTensor* x : {&t.x, &t.y}) x->data = static_cast<double*>(x->data) + p * x->pseudo_stride;
      reference::premix_forward(turn_only, t);
    }
    expect_near(values(turned, fused.y_shape), values(fused.tensors.y, fused.y_shape), 1e-14, "y");
  }
}

TEST(Rope, ScoresDependOnDistanceOnly) {
  PremixCase c = premix_case(1, 1, 3, 1, 6);
  c.problem.rope_dim = 6;
  Premix near(c);
  c.problem.rope_offset = 7;
  Premix far(c);
  reference::premix_forward(near.problem, near.tensors);
  reference::premix_forward(far.problem, far.tensors);
  const std::vector<double> a = values(near.tensors.y, near.y_shape), b = values(far.tensors.y, far.y_shape);
  EXPECT_GT(std::abs(a[0] - b[0]), 1e-3);
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t j = 0; j < 3; ++j) {
      EXPECT_NEAR(reference::dot(&a[static_cast<size_t>(6 * i)], &a[static_cast<size_t>(6 * j)], 6),
                  reference::dot(&b[static_cast<size_t>(6 * i)], &b[static_cast<size_t>(6 * j)], 6), 1e-12);
    }
  }
}

void check_premix(const PremixCase& c) {
  Premix m(c);
  PremixTensors& t = m.tensors;
  reference::premix_forward(m.problem, t);
  reference::premix_backward(m.problem, t);
  EXPECT_EQ(m.arena.written(t.y.data), elements(m.y_shape));
  EXPECT_EQ(m.arena.written(t.dx.data), elements(m.x_shape));
  EXPECT_EQ(m.arena.written(t.dw.data), elements(shape_of(t.dw)));
  const auto loss = [&] {
    reference::premix_forward(m.problem, t);
    return weighted_sum(t.y, t.dy, m.y_shape);
  };
  expect_gradient(t.x, t.dx, m.x_shape, loss, "dx");
  expect_gradient(as_canonical(t.w), as_canonical(t.dw), shape_of(t.w), loss, "dw");
}

TEST(Premix, GradientsMatchFiniteDifferences) {
  check_premix(premix_case(2, 3, 3, 2, 4));
  for (const RopeStyle style : {RopeStyle::kHalf, RopeStyle::kPairs}) {
    for (const RopeIndex index : {RopeIndex::kToken, RopeIndex::kRow}) {
      for (const int64_t packed : {0, 1, 2}) {
        SCOPED_TRACE(std::to_string(static_cast<int>(style)) + " " + std::to_string(static_cast<int>(index)) + " " +
                     std::to_string(packed));
        PremixCase c = premix_case(2, 2, 3, 3, 5);
        c.problem.rope_dim = 4, c.problem.rope_offset = 2, c.problem.rope_style = style, c.problem.rope_index = index;
        c.strides = Strides::kRandom;
        if (packed > 0) c.lens = {2, 0, 3}, c.tail = 2;
        if (packed > 1) c.other_lens = {3, 1, 7};
        check_premix(c);
      }
    }
  }
}

TEST(Premix, PackedRestartsAndShiftsPositionsPerSequence) {
  for (const RopeIndex index : {RopeIndex::kToken, RopeIndex::kRow}) {
    PremixCase c = premix_case(0, 2, 0, 2, 4);
    c.problem.rope_dim = 4, c.problem.rope_index = index, c.problem.rope_offset = 1;
    c.lens = {2, 0, 3}, c.other_lens = {4, 2, 3}, c.tail = 1;
    Premix m(c);
    reference::premix_forward(m.problem, m.tensors);
    const std::vector<double> packed = values(m.tensors.y, m.y_shape);
    const CanonicalTensor each = m.arena.poisoned(DType::kFloat64, m.y_shape);
    assign(each, m.y_shape, std::vector<double>(packed.size(), 0.0));  // the tail is zero
    for (int64_t index_of = 0; index_of < 3; ++index_of) {
      const auto at = static_cast<size_t>(index_of);
      PremixProblem dense = m.problem;
      dense.packed = false, dense.batch = 1, dense.seqlen = c.lens[at];
      dense.rope_offset = 1 + c.other_lens[at] - c.lens[at];
      PremixTensors t = m.tensors;
      t.y = each;
      for (CanonicalTensor* x : {&t.x, &t.y}) {
        x->data = static_cast<double*>(x->data) + m.tensors.cu_seqlens[index_of] * x->seq_stride;
      }
      reference::premix_forward(dense, t);
    }
    EXPECT_EQ(packed, values(each, m.y_shape));
  }
}

CollapseCase collapse_case(bool global, int64_t batch, int64_t heads, int64_t seqlen, int64_t pseudo_heads,
                           int64_t head_dim) {
  CollapseCase c;
  c.problem.global = global, c.problem.batch = batch, c.problem.heads = heads, c.problem.seqlen = seqlen;
  c.problem.pseudo_heads = pseudo_heads, c.problem.head_dim = head_dim;
  c.problem.dtype = c.problem.weight_dtype = DType::kFloat64;
  return c;
}

TEST(Collapse, ByHand) {
  Collapse per_head(collapse_case(false, 1, 2, 1, 2, 1));
  assign(per_head.tensors.x, per_head.x_shape, {1, 10, 100, 1000});
  assign(as_canonical(per_head.tensors.r), shape_of(per_head.tensors.r), {1, 2, 3, 4});
  reference::collapse_forward(per_head.problem, per_head.tensors);
  EXPECT_EQ(values(per_head.tensors.y, per_head.y_shape), (std::vector<double>{21, 4300}));
  Collapse global(collapse_case(true, 1, 2, 1, 2, 1));
  assign(global.tensors.x, global.x_shape, {1, 10, 100, 1000});
  assign(as_canonical(global.tensors.r), shape_of(global.tensors.r), {1, 2, 3, 4, 5, 6, 7, 8});
  reference::collapse_forward(global.problem, global.tensors);
  EXPECT_EQ(values(global.tensors.y, global.y_shape), (std::vector<double>{4321, 8765}));
}

TEST(Collapse, GradientsMatchFiniteDifferences) {
  for (const bool global : {false, true}) {
    CollapseCase c = collapse_case(global, 2, 3, 3, 2, 4);
    c.strides = Strides::kRandom;
    Collapse m(c);
    CollapseTensors& t = m.tensors;
    reference::collapse_forward(m.problem, t);
    reference::collapse_backward(m.problem, t);
    EXPECT_EQ(m.arena.written(t.y.data), elements(m.y_shape));
    EXPECT_EQ(m.arena.written(t.dx.data), elements(m.x_shape));
    EXPECT_EQ(m.arena.written(t.dr.data), elements(shape_of(t.dr)));
    const auto loss = [&] {
      reference::collapse_forward(m.problem, t);
      return weighted_sum(t.y, t.dy, m.y_shape);
    };
    expect_gradient(t.x, t.dx, m.x_shape, loss, "dx");
    expect_gradient(as_canonical(t.r), as_canonical(t.dr), shape_of(t.r), loss, "dr");
  }
}

TEST(Iha, EmptyAndLowPrecision) {
  Premix empty(premix_case(1, 2, 0, 2, 3));
  reference::premix_forward(empty.problem, empty.tensors);
  reference::premix_backward(empty.problem, empty.tensors);
  for (const double x : values(as_canonical(empty.tensors.dw), shape_of(empty.tensors.dw))) EXPECT_EQ(x, 0.0);
  CollapseCase none = collapse_case(true, 1, 2, 0, 2, 3);
  Collapse nothing(none);
  reference::collapse_forward(nothing.problem, nothing.tensors);
  reference::collapse_backward(nothing.problem, nothing.tensors);
  for (const double x : values(as_canonical(nothing.tensors.dr), shape_of(nothing.tensors.dr))) EXPECT_EQ(x, 0.0);

  PremixCase c = premix_case(1, 1, 1, 1, 1);
  c.problem.dtype = DType::kBFloat16, c.problem.weight_dtype = DType::kFloat32;
  Premix half(c);
  assign(half.tensors.x, half.x_shape, {1.0 + 0x1p-7});
  assign(half.tensors.dy, half.y_shape, {3.0});
  assign(as_canonical(half.tensors.w), shape_of(half.tensors.w), {1.0 + 0x1p-7});
  reference::premix_forward(half.problem, half.tensors);
  reference::premix_backward(half.problem, half.tensors);
  EXPECT_EQ(values(half.tensors.y, half.y_shape), std::vector<double>{1.0 + 0x1p-6});  // (1 + 2^-7)^2, rounded
  EXPECT_EQ(values(as_canonical(half.tensors.dw), shape_of(half.tensors.dw)), std::vector<double>{3.0 + 3 * 0x1p-7});
}

}  // namespace
}  // namespace plait::testing
