// Test problems as calls of the public API: views of their tensors, arguments, and their twins in float64.
// Called by tests/api/fuzz_*.cpp and tests/cuda.
#pragma once

#include <vector>

#include "plait/iha.hpp"
#include "support/place.hpp"
#include "support/problem_builder.hpp"

namespace plait::testing {

// A test tensor as the public API takes it.
inline TensorView view_of(const CanonicalTensor& t, const Shape& shape, Layout layout, bool packed, bool pseudo) {
  const int64_t strides[] = {t.batch_stride, t.head_stride, t.seq_stride, t.pseudo_stride, t.dim_stride};
  const bool bhsd = layout == Layout::kBhsd;
  std::vector<int> order = packed ? std::vector{2, 1} : bhsd ? std::vector{0, 1, 2} : std::vector{0, 2, 1};
  if (pseudo) order.push_back(3);
  order.push_back(4);
  TensorView view;
  view.data = t.data, view.dtype = t.dtype;
  for (const int dim : order) view.shape[view.rank] = shape[dim], view.stride[view.rank++] = strides[dim];
  return view;
}
inline TensorView view_of(const RowTensor& t, const Shape& shape, bool packed) {
  TensorView view;
  view.data = t.data, view.dtype = t.dtype;
  if (!packed) view.shape[view.rank] = shape[0], view.stride[view.rank++] = t.batch_stride;
  view.shape[view.rank] = shape[1], view.stride[view.rank++] = t.head_stride;
  view.shape[view.rank] = shape[2], view.stride[view.rank++] = t.row_stride;
  return view;
}
inline TensorView vector_view(const void* data, DType dtype, int64_t count, int64_t stride = 1) {
  TensorView view = TensorView::contiguous(const_cast<void*>(data), dtype, {count});
  view.stride[0] = stride;
  return view;
}

// ---- attention

inline AttentionArgs arguments(const Attention& a, const AttentionOptions& options) {
  const bool packed = a.problem.packed, pseudo = options.mode != HeadMode::kPlain;
  AttentionArgs args;
  args.q = view_of(a.inputs.q, a.q_shape, options.layout, packed, pseudo);
  args.k = view_of(a.inputs.k, a.k_shape, options.layout, packed, pseudo);
  args.v = view_of(a.inputs.v, a.v_shape, options.layout, packed, pseudo);
  if (a.problem.has_sinks) {
    args.sinks = vector_view(a.inputs.sinks, a.row_dtype(), a.problem.heads_q, a.inputs.sinks_stride);
  }
  if (packed) {
    args.cu_seqlens_q = vector_view(a.inputs.cu_seqlens_q, DType::kInt32, a.problem.batch + 1);
    args.cu_seqlens_k = vector_view(a.inputs.cu_seqlens_kv, DType::kInt32, a.problem.batch + 1);
  }
  args.options = options;
  return args;
}

inline AttentionOutputs outputs(const Attention& a, const AttentionTensors& t, const AttentionOptions& options) {
  const bool packed = a.problem.packed;
  return {view_of(t.out, a.out_shape, options.layout, packed, options.mode == HeadMode::kInterleaved),
          view_of(t.lse, a.lse_shape, packed)};
}

// A backward has no strategy to choose.
inline AttentionBackwardArgs backward_arguments(const Attention& a, const AttentionTensors& t, AttentionOptions options,
                                                bool dlse) {
  options.strategy = Strategy::kAuto, options.split_size = 0;
  const bool packed = a.problem.packed;
  const auto [out, lse] = outputs(a, t, options);
  AttentionBackwardArgs args{arguments(a, options), out, lse, out, {}};
  args.dout = view_of(t.dout, a.out_shape, options.layout, packed, options.mode == HeadMode::kInterleaved);
  if (dlse) args.dlse = view_of(t.dlse, a.lse_shape, packed);
  return args;
}

inline AttentionGrads gradients(const Attention& a, const AttentionTensors& t, const AttentionOptions& options) {
  const bool packed = a.problem.packed, pseudo = options.mode != HeadMode::kPlain;
  AttentionGrads grads{view_of(t.dq, a.q_shape, options.layout, packed, pseudo),
                       view_of(t.dk, a.k_shape, options.layout, packed, pseudo),
                       view_of(t.dv, a.v_shape, options.layout, packed, pseudo),
                       {}};
  if (a.problem.has_sinks) grads.dsinks = vector_view(t.dsinks, a.row_dtype(), a.problem.heads_q, t.dsinks_stride);
  return grads;
}

inline void copy_values(const CanonicalTensor& from, const CanonicalTensor& to, const Shape& shape) {
  assign(to, shape, values(from, shape));
}
inline void copy_values(const TensorView& from, const TensorView& to) {
  copy_values(as_canonical(from), as_canonical(to), shape_of(from));
}

// The same problem in float64 on the reference, with the very numbers of `from`.
struct Wide {
  AttentionOptions options;
  Attention a;

  static AttentionCase float64(AttentionCase c) {
    c.problem.dtype = DType::kFloat64, c.out_float32 = false, c.strides = Strides::kBhsd;
    return c;
  }
  Wide(const AttentionCase& c, const AttentionOptions& of, const Attention& from) : options(of), a(float64(c)) {
    options.backend = Backend::kReference;
    options.strategy = Strategy::kAuto, options.split_size = 0, options.out_dtype.reset();
    copy_values(from.inputs.q, a.inputs.q, a.q_shape);
    copy_values(from.inputs.k, a.inputs.k, a.k_shape);
    copy_values(from.inputs.v, a.inputs.v, a.v_shape);
    copy_values(from.inputs.dout, a.inputs.dout, a.out_shape);
    copy_values(as_canonical(from.inputs.dlse), as_canonical(a.inputs.dlse), a.lse_shape);
    if (a.problem.has_sinks) copy_values(from.sinks(), a.sinks(), a.sinks_shape());
  }
};

// ---- premix and collapse

inline PremixArgs arguments(const Premix& m, Layout layout, Backend backend) {
  const PremixProblem& p = m.problem;
  PremixArgs args{.x = view_of(m.tensors.x, m.x_shape, layout, p.packed, false),
                  .w = m.tensors.w,
                  .rope = {},
                  .cu_seqlens = {},
                  .cu_seqlens_other = {},
                  .layout = layout,
                  .backend = backend};
  if (p.has_rope) args.rope = Rope{m.tensors.cos, m.tensors.sin, p.rope_style, p.rope_index, p.rope_offset};
  if (p.packed) args.cu_seqlens = vector_view(m.tensors.cu_seqlens, DType::kInt32, p.batch + 1);
  if (m.tensors.cu_seqlens_other != nullptr) {
    args.cu_seqlens_other = vector_view(m.tensors.cu_seqlens_other, DType::kInt32, p.batch + 1);
  }
  return args;
}

inline Premix float64(const PremixCase& c, const Premix& from) {
  PremixCase wide_case = c;
  wide_case.problem.dtype = wide_case.problem.weight_dtype = DType::kFloat64;
  Premix wide(wide_case);
  copy_values(from.tensors.x, wide.tensors.x, from.x_shape);
  copy_values(from.tensors.dy, wide.tensors.dy, from.y_shape);
  copy_values(from.tensors.w, wide.tensors.w);
  if (from.problem.has_rope) {
    copy_values(from.tensors.cos, wide.tensors.cos), copy_values(from.tensors.sin, wide.tensors.sin);
  }
  return wide;
}

inline CollapseArgs arguments(const Collapse& m, bool packed, Layout layout, Backend backend) {
  return {view_of(m.tensors.x, m.x_shape, layout, packed, true), m.tensors.r, packed, layout, backend};
}

inline Collapse float64(const CollapseCase& c, const Collapse& from) {
  CollapseCase wide_case = c;
  wide_case.problem.dtype = wide_case.problem.weight_dtype = DType::kFloat64;
  Collapse wide(wide_case);
  copy_values(from.tensors.x, wide.tensors.x, from.x_shape);
  copy_values(from.tensors.dy, wide.tensors.dy, from.y_shape);
  copy_values(from.tensors.r, wide.tensors.r);
  return wide;
}

// Forward and backward on fresh places, one for each run.
template <class MakePlace>
void run_both(const Premix& m, Layout layout, Backend backend, MakePlace place) {
  const PremixArgs args = arguments(m, layout, backend);
  const bool packed = m.problem.packed;
  const auto pseudo = [&](const CanonicalTensor& t) { return view_of(t, m.y_shape, layout, packed, true); };
  run(*place(), args, pseudo(m.tensors.y));
  run(*place(), args, pseudo(m.tensors.dy), view_of(m.tensors.dx, m.x_shape, layout, packed, false), m.tensors.dw);
}
// All of them in one call each way.
template <class MakePlace>
void run_together(const std::vector<std::unique_ptr<Premix>>& all, Layout layout, Backend backend, MakePlace place) {
  std::vector<PremixArgs> args;
  std::vector<TensorView> ys;
  std::vector<PremixGradients> gradients;
  for (const auto& m : all) {
    const bool packed = m->problem.packed;
    const auto pseudo = [&](const CanonicalTensor& t) { return view_of(t, m->y_shape, layout, packed, true); };
    args.push_back(arguments(*m, layout, backend));
    ys.push_back(pseudo(m->tensors.y));
    gradients.push_back(
        {pseudo(m->tensors.dy), view_of(m->tensors.dx, m->x_shape, layout, packed, false), m->tensors.dw});
  }
  run(*place(), args, ys);
  run(*place(), args, gradients);
}
template <class MakePlace>
void run_both(const Collapse& m, bool packed, Layout layout, Backend backend, MakePlace place) {
  const CollapseArgs args = arguments(m, packed, layout, backend);
  const auto plain = [&](const CanonicalTensor& t) { return view_of(t, m.y_shape, layout, packed, false); };
  run(*place(), args, plain(m.tensors.y));
  run(*place(), args, plain(m.tensors.dy), view_of(m.tensors.dx, m.x_shape, layout, packed, true), m.tensors.dr);
}

}  // namespace plait::testing
