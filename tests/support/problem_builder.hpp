// Random attention, premix and collapse problems that own their memory, with NaN-filled outputs.
// Called by the tests of every backend. Same case and seed, same problem.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "core/problem.hpp"
#include "reference/access.hpp"
#include "support/arena.hpp"

namespace plait::testing {

// Lengths for a packed case: each 0 to `longest`, about one in four of them 0.
inline std::vector<int32_t> random_lengths(uint64_t seed, int64_t sequences, int32_t longest) {
  std::mt19937_64 rng(seed);
  std::vector<int32_t> lens;
  for (int64_t i = 0; i < sequences; ++i) {
    const bool empty = rng() % 4 == 0;
    lens.push_back(empty ? 0 : static_cast<int32_t>(rng() % static_cast<uint64_t>(longest + 1)));
  }
  return lens;
}

struct AttentionCase {
  // Sizes and options. Set by the builder: out_dtype, scale, and for packed cases packed, batch, seqlen_*.
  AttentionProblem problem;
  std::optional<double> scale;           // default 1/sqrt(head_dim)
  bool out_float32 = false;              // else out in the input dtype
  std::vector<int32_t> q_lens, kv_lens;  // not empty: packed, one length per sequence
  int64_t q_tail = 0, kv_tail = 0;       // packed: NaN rows past cu_seqlens[-1]
  Strides strides = Strides::kBhsd;
  bool expanded = false;  // stride 0: batch (packed: heads) of k and v, dim of dout
  double q_gain = 1.0;    // 4: peaky logits
  uint64_t seed = 1;
};

struct Attention {
  Arena arena;
  AttentionProblem problem;
  AttentionTensors inputs;  // q, k, v, sinks, cu_seqlens, dout, dlse; no outputs
  Shape q_shape, k_shape, v_shape, out_shape, lse_shape;

  explicit Attention(const AttentionCase& c) : arena(c.seed, c.strides), problem(c.problem) {
    AttentionProblem& p = problem;
    p.packed = !c.q_lens.empty();
    if (p.packed) {
      p.batch = static_cast<int64_t>(c.q_lens.size());
      inputs.cu_seqlens_q = arena.cumulative(c.q_lens), inputs.cu_seqlens_kv = arena.cumulative(c.kv_lens);
      p.seqlen_q = inputs.cu_seqlens_q[p.batch] + c.q_tail, p.seqlen_kv = inputs.cu_seqlens_kv[p.batch] + c.kv_tail;
    }
    p.scale = c.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    p.out_dtype = c.out_float32 ? DType::kFloat32 : p.dtype;
    const int64_t outer = p.packed ? 1 : p.batch, q_used = p.seqlen_q - c.q_tail, kv_used = p.seqlen_kv - c.kv_tail;
    const int64_t rows_each = p.rows_per_position();
    q_shape = {outer, p.heads_q, p.seqlen_q, p.pseudo_heads, p.head_dim};
    k_shape = {outer, p.heads_kv, p.seqlen_kv, p.pseudo_heads, p.head_dim};
    v_shape = {outer, p.heads_kv, p.seqlen_kv, p.pseudo_heads, p.head_dim_v};
    out_shape = {outer, p.heads_q, p.seqlen_q, rows_each, p.head_dim_v};
    lse_shape = {outer, p.heads_q, p.seqlen_q * rows_each, 1, 1};
    const unsigned kv_expanded = !c.expanded ? 0u : p.packed ? 1u << 1 : 1u << 0;
    inputs.q = arena.random(p.dtype, q_shape, q_used, c.q_gain);
    inputs.k = arena.random(p.dtype, k_shape, kv_used, 1.0, kv_expanded);
    inputs.v = arena.random(p.dtype, v_shape, kv_used, 1.0, kv_expanded);
    inputs.dout = arena.random(p.out_dtype, out_shape, q_used, 1.0, c.expanded ? 1u << 4 : 0u);
    inputs.dlse = arena.rows(row_dtype(), outer, p.heads_q, lse_shape[2], q_used * rows_each);
    if (!p.has_sinks) return;
    const RowTensor sinks = arena.rows(row_dtype(), 1, 1, p.heads_q, p.heads_q);
    inputs.sinks = sinks.data, inputs.sinks_stride = sinks.row_stride;
  }

  DType row_dtype() const { return problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  Shape sinks_shape() const { return {1, 1, problem.heads_q, 1, 1}; }
  CanonicalTensor sinks() const {
    return {const_cast<void*>(inputs.sinks), row_dtype(), 0, 0, inputs.sinks_stride, 0, 0};
  }

  // The inputs with fresh, NaN-filled out and lse.
  AttentionTensors with_outputs() {
    problem.op = Op::kAttentionForward;
    AttentionTensors t = inputs;
    t.out = arena.poisoned(problem.out_dtype, out_shape);
    t.lse = arena.rows(row_dtype(), lse_shape[0], lse_shape[1], lse_shape[2], 0);
    return t;
  }
  // The tensors of a finished forward call with fresh, NaN-filled gradients.
  AttentionTensors with_gradients(const AttentionTensors& forward) {
    problem.op = Op::kAttentionBackward;
    AttentionTensors t = forward;
    t.dq = arena.poisoned(problem.dtype, q_shape);
    t.dk = arena.poisoned(problem.dtype, k_shape);
    t.dv = arena.poisoned(problem.dtype, v_shape);
    if (!problem.has_sinks) return t;
    const RowTensor dsinks = arena.rows(row_dtype(), 1, 1, problem.heads_q, 0);
    t.dsinks = dsinks.data, t.dsinks_stride = dsinks.row_stride;
    return t;
  }
  CanonicalTensor dsinks(const AttentionTensors& t) const {
    return {t.dsinks, row_dtype(), 0, 0, t.dsinks_stride, 0, 0};
  }
};

struct PremixCase {
  PremixProblem problem;                  // rope_dim > 0 turns RoPE on; the builder sets has_rope and rope_rows
  std::vector<int32_t> lens, other_lens;  // lens not empty: packed; other_lens: cu_seqlens_other
  int64_t tail = 0;                       // packed: NaN rows past cu_seqlens[-1]
  Strides strides = Strides::kBhsd;
  uint64_t seed = 1;
};

struct Premix {
  Arena arena;
  PremixProblem problem;
  PremixTensors tensors;  // x, dy, w and tables random; y, dx, dw NaN
  Shape x_shape, y_shape;

  explicit Premix(const PremixCase& c) : arena(c.seed, c.strides), problem(c.problem) {
    PremixProblem& p = problem;
    p.packed = !c.lens.empty();
    int64_t positions = p.seqlen + p.rope_offset;
    if (p.packed) {
      p.batch = static_cast<int64_t>(c.lens.size());
      tensors.cu_seqlens = arena.cumulative(c.lens);
      if (!c.other_lens.empty()) tensors.cu_seqlens_other = arena.cumulative(c.other_lens);
      p.seqlen = tensors.cu_seqlens[p.batch] + c.tail;
      const std::vector<int32_t>& ends = c.other_lens.empty() ? c.lens : c.other_lens;
      positions = *std::max_element(ends.begin(), ends.end()) + p.rope_offset;
    }
    const int64_t outer = p.packed ? 1 : p.batch, used = p.seqlen - c.tail;
    x_shape = {outer, p.heads, p.seqlen, 1, p.head_dim}, y_shape = x_shape;
    y_shape[3] = p.pseudo_heads;
    tensors.x = arena.random(p.dtype, x_shape, used), tensors.dy = arena.random(p.dtype, y_shape, used);
    tensors.y = arena.poisoned(p.dtype, y_shape), tensors.dx = arena.poisoned(p.dtype, x_shape);
    tensors.w = arena.view(p.weight_dtype, p.heads, p.pseudo_heads, p.heads, true);
    tensors.dw = arena.view(p.weight_dtype, p.heads, p.pseudo_heads, p.heads, false);
    p.has_rope = p.rope_dim > 0;
    if (!p.has_rope) return;
    p.rope_rows = positions * (p.rope_index == RopeIndex::kRow ? p.pseudo_heads : 1);
    const DType table = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    tensors.cos = arena.view(table, p.rope_rows, p.rope_dim / 2, 0, false);
    tensors.sin = arena.view(table, p.rope_rows, p.rope_dim / 2, 0, false);
    for (int64_t n = 0; n < p.rope_rows; ++n) {
      for (int64_t i = 0; i < p.rope_dim / 2; ++i) {
        const double angle = static_cast<double>(n) * std::pow(100.0, -2.0 * i / static_cast<double>(p.rope_dim));
        reference::store(tensors.cos, n, i, 0, std::cos(angle));
        reference::store(tensors.sin, n, i, 0, std::sin(angle));
      }
    }
  }
};

struct CollapseCase {
  CollapseProblem problem;
  Strides strides = Strides::kBhsd;
  uint64_t seed = 1;
};

struct Collapse {
  Arena arena;
  CollapseProblem problem;
  CollapseTensors tensors;  // x, dy, r random; y, dx, dr NaN
  Shape x_shape, y_shape;

  explicit Collapse(const CollapseCase& c) : arena(c.seed, c.strides), problem(c.problem) {
    const CollapseProblem& p = problem;
    x_shape = {p.batch, p.heads, p.seqlen, p.pseudo_heads, p.head_dim}, y_shape = x_shape;
    y_shape[3] = 1;
    tensors.x = arena.random(p.dtype, x_shape, p.seqlen), tensors.dy = arena.random(p.dtype, y_shape, p.seqlen);
    tensors.y = arena.poisoned(p.dtype, y_shape), tensors.dx = arena.poisoned(p.dtype, x_shape);
    const int64_t last = p.global ? p.pseudo_heads : 0, middle = p.global ? p.heads : p.pseudo_heads;
    tensors.r = arena.view(p.weight_dtype, p.heads, middle, last, true);
    tensors.dr = arena.view(p.weight_dtype, p.heads, middle, last, false);
  }
};

}  // namespace plait::testing
