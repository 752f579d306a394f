// Premix, collapse and merge: arguments to problems and tensors.
// Called by api/iha.cpp and api/merge.cpp.
#include "core/check.hpp"
#include "core/validate.hpp"

namespace plait {
namespace {

void check_weight(Named weight, Named x) {
  check_dtype(weight, {DType::kFloat32, x.view->dtype}, "weights are float32 or of the dtype of x");
  check_same_device(weight, x);
}

// x and its like: floating, of the rank of `axes`, head dim in range.
void check_source(Named x, const Axes& axes) {
  check_tensor(x, axes.rank(), axes_text(axes, "H", "N", "D"));
  check_floating(x);
  check_same_device(x, x);
  check_head_dim(x.name, extent(*x.view, axes.dim));
}

// Refuses unless `tensor` has the extents of `like` on every axis they share, and `pseudo` pseudo-heads.
void check_like(Named tensor, const Axes& axes, Named like, const Axes& like_axes, int64_t pseudo) {
  const std::string why = fmt::format("as {} has", like.name);
  check_tensor(tensor, axes.rank(), axes_text(axes, "H", "N", "D"));
  if (axes.batch >= 0) check_extent(tensor, axes.batch, extent(*like.view, like_axes.batch), why);
  check_extent(tensor, axes.heads, extent(*like.view, like_axes.heads), why);
  check_extent(tensor, axes.seqlen, extent(*like.view, like_axes.seqlen), why);
  check_extent(tensor, axes.dim, extent(*like.view, like_axes.dim), why);
  if (axes.pseudo >= 0) check_extent(tensor, axes.pseudo, pseudo, "P");
  check_same_dtype(tensor, like);
  check_same_device(tensor, like);
}

void check_weight_grad(Named grad, Named weight) {
  check_tensor(grad, weight.view->rank, weight.view->shape_string());
  for (int axis = 0; axis < weight.view->rank; ++axis) {
    check_extent(grad, axis, weight.view->shape[axis], fmt::format("the shape of {}", weight.name));
  }
  check_same_dtype(grad, weight);
  check_same_device(grad, weight);
}

// Table rows that a sequence of `length` positions starting at `offset` needs.
void check_rope_range(const PremixProblem& problem, int64_t offset, int64_t length) {
  if (length == 0 || problem.batch == 0 || problem.heads == 0) return;
  if (offset < 0) {
    refuse(
        "rope",
        fmt::format("the first row stands at position {}; positions are >= 0 (more queries than keys have no position)",
                    offset));
  }
  int64_t needed = offset + length;
  if (problem.rope_index == RopeIndex::kRow && __builtin_mul_overflow(needed, problem.pseudo_heads, &needed)) {
    needed = INT64_MAX;
  }
  if (needed > problem.rope_rows) {
    refuse("rope",
           fmt::format("the tables have {} rows, expected at least {} (positions up to {}{}); build longer tables",
                       problem.rope_rows, needed, offset + length,
                       problem.rope_index == RopeIndex::kRow ? ", times P virtual rows" : ""));
  }
}

void validate_rope(const PremixArgs& args, PremixProblem& problem, PremixTensors& tensors) {
  const Rope& rope = *args.rope;
  check_rope_tables(rope, problem.dtype, problem.head_dim, named("x", args.x));
  problem.has_rope = true;
  problem.rope_style = rope.style;
  problem.rope_index = rope.index;
  problem.rope_dim = 2 * rope.cos.shape[1];
  problem.rope_offset = rope.offset;
  problem.rope_rows = rope.cos.shape[0];
  constexpr int64_t kMaxOffset = int64_t{1} << 40;
  if (rope.offset < -kMaxOffset || rope.offset > kMaxOffset)
    refuse("rope", fmt::format("got offset {}, expected the position of the first row, at most 2^40", rope.offset));
  if (!problem.packed) check_rope_range(problem, rope.offset, problem.seqlen);
  tensors.cos = rope.cos;
  tensors.sin = rope.sin;
}

// What both directions share: everything but y, dy, dx, dw.
ValidatedPremix validate_inputs(const PremixArgs& args, Op op) {
  const bool packed = args.cu_seqlens.has_value();
  const Axes axes = axes_of(args.layout, packed, /*pseudo=*/false);
  const Named x = named("x", args.x), w = named("w", args.w);
  check_source(x, axes);
  check_tensor(w, 3, "[H, P, H]");
  ValidatedPremix result;
  PremixProblem& problem = result.problem;
  problem.op = op;
  problem.batch = extent(args.x, axes.batch);
  problem.heads = extent(args.x, axes.heads);
  problem.seqlen = extent(args.x, axes.seqlen);
  problem.pseudo_heads = args.w.shape[1];
  problem.head_dim = extent(args.x, axes.dim);
  problem.dtype = args.x.dtype;
  problem.weight_dtype = args.w.dtype;
  problem.device = args.x.device;
  problem.packed = packed;
  problem.backend = args.backend;
  check_shape(w, {problem.heads, problem.pseudo_heads, problem.heads}, "[H, P, H] with the heads H of x");
  if (problem.pseudo_heads < 1) refuse("w", fmt::format("got P = 0 in {}, expected at least 1", args.w.shape_string()));
  check_weight(w, x);
  if (args.cu_seqlens_other && !packed) refuse("cu_seqlens_other", "was given without cu_seqlens");
  if (packed) {
    problem.batch = check_cu_seqlens(named("cu_seqlens", *args.cu_seqlens), x);
    result.tensors.cu_seqlens = static_cast<const int32_t*>(args.cu_seqlens->data);
  }
  if (args.cu_seqlens_other) {
    if (check_cu_seqlens(named("cu_seqlens_other", *args.cu_seqlens_other), x) != problem.batch) {
      refuse("cu_seqlens_other", fmt::format("got {} offsets, expected {} as cu_seqlens has",
                                             args.cu_seqlens_other->shape[0], problem.batch + 1));
    }
    result.tensors.cu_seqlens_other = static_cast<const int32_t*>(args.cu_seqlens_other->data);
  }
  if (args.rope) validate_rope(args, problem, result.tensors);
  result.tensors.x = canonical(args.x, axes);
  result.tensors.w = args.w;
  return result;
}

// Contents of the offsets, and every sequence's reach into the rotary tables.
void validate_packed_values(const PremixArgs& args, const PremixProblem& problem, const PremixTensors& tensors) {
  if (!problem.packed) return;
  constexpr int64_t kAnyTotal = INT32_MAX;
  check_cu_seqlens_values(named("cu_seqlens", *args.cu_seqlens), problem.seqlen);
  if (args.cu_seqlens_other) check_cu_seqlens_values(named("cu_seqlens_other", *args.cu_seqlens_other), kAnyTotal);
  if (!problem.has_rope || problem.device.kind != DeviceKind::kCpu) return;
  for (int64_t i = 0; i < problem.batch; ++i) {
    const int64_t length = tensors.cu_seqlens[i + 1] - tensors.cu_seqlens[i];
    const int32_t* other = tensors.cu_seqlens_other;
    if (other != nullptr && other[i + 1] == other[i]) continue;  // no keys: the rows see nothing and are not turned
    check_rope_range(problem, problem.rope_offset + (other != nullptr ? other[i + 1] - other[i] - length : 0), length);
  }
}

ValidatedCollapse validate_inputs(const CollapseArgs& args, Op op) {
  const Axes axes = axes_of(args.layout, args.packed, /*pseudo=*/true);
  const Named x = named("x", args.x), r = named("collapse", args.r);
  check_source(x, axes);
  ValidatedCollapse result;
  CollapseProblem& problem = result.problem;
  problem.op = op;
  problem.batch = extent(args.x, axes.batch);
  problem.heads = extent(args.x, axes.heads);
  problem.seqlen = extent(args.x, axes.seqlen);
  problem.pseudo_heads = extent(args.x, axes.pseudo);
  problem.head_dim = extent(args.x, axes.dim);
  problem.dtype = args.x.dtype;
  problem.weight_dtype = args.r.dtype;
  problem.device = args.x.device;
  problem.global = args.r.rank == 3;
  problem.backend = args.backend;
  if (problem.pseudo_heads < 1) refuse("x", fmt::format("got P = 0 in {}, expected at least 1", args.x.shape_string()));
  if (problem.global) {
    check_shape(r, {problem.heads, problem.heads, problem.pseudo_heads}, "[H, H, P], the global form");
  } else {
    check_shape(r, {problem.heads, problem.pseudo_heads}, "[H, P] per head, or [H, H, P] for the global form");
  }
  check_weight(r, x);
  result.tensors.x = canonical(args.x, axes);
  result.tensors.r = args.r;
  return result;
}

}  // namespace

ValidatedPremix validate(const PremixArgs& args, const TensorView* y) {
  ValidatedPremix result = validate_inputs(args, Op::kPremixForward);
  if (y == nullptr) return result;
  const Axes axes = axes_of(args.layout, result.problem.packed, /*pseudo=*/true);
  const Axes x_axes = axes_of(args.layout, result.problem.packed, /*pseudo=*/false);
  check_like(named("y", *y), axes, named("x", args.x), x_axes, result.problem.pseudo_heads);
  check_no_alias({named("y", *y)}, {named("x", args.x),
                                    named("w", args.w),
                                    {"cu_seqlens", view_of(args.cu_seqlens)},
                                    {"cu_seqlens_other", view_of(args.cu_seqlens_other)},
                                    {"rope cos", args.rope ? &args.rope->cos : nullptr},
                                    {"rope sin", args.rope ? &args.rope->sin : nullptr}});
  validate_packed_values(args, result.problem, result.tensors);
  result.tensors.y = canonical(*y, axes);
  return result;
}

ValidatedPremix validate(const PremixArgs& args, const TensorView* dy, const TensorView* dx, const TensorView* dw) {
  ValidatedPremix result = validate_inputs(args, Op::kPremixBackward);
  if (dy == nullptr) return result;
  const Axes axes = axes_of(args.layout, result.problem.packed, /*pseudo=*/true);
  const Axes x_axes = axes_of(args.layout, result.problem.packed, /*pseudo=*/false);
  check_like(named("dy", *dy), axes, named("x", args.x), x_axes, result.problem.pseudo_heads);
  check_like(named("dx", *dx), x_axes, named("x", args.x), x_axes, 1);
  check_weight_grad(named("dw", *dw), named("w", args.w));
  check_no_alias({named("dx", *dx), named("dw", *dw)}, {named("x", args.x),
                                                        named("w", args.w),
                                                        named("dy", *dy),
                                                        {"cu_seqlens", view_of(args.cu_seqlens)},
                                                        {"cu_seqlens_other", view_of(args.cu_seqlens_other)},
                                                        {"rope cos", args.rope ? &args.rope->cos : nullptr},
                                                        {"rope sin", args.rope ? &args.rope->sin : nullptr}});
  validate_packed_values(args, result.problem, result.tensors);
  result.tensors.dy = canonical(*dy, axes);
  result.tensors.dx = canonical(*dx, x_axes);
  result.tensors.dw = *dw;
  return result;
}

ValidatedCollapse validate(const CollapseArgs& args, const TensorView* y) {
  ValidatedCollapse result = validate_inputs(args, Op::kCollapseForward);
  if (y == nullptr) return result;
  const Axes axes = axes_of(args.layout, args.packed, /*pseudo=*/false);
  check_like(named("y", *y), axes, named("x", args.x), axes_of(args.layout, args.packed, /*pseudo=*/true), 1);
  check_no_alias({named("y", *y)}, {named("x", args.x), named("collapse", args.r)});
  result.tensors.y = canonical(*y, axes);
  return result;
}

ValidatedCollapse validate(const CollapseArgs& args, const TensorView* dy, const TensorView* dx, const TensorView* dr) {
  ValidatedCollapse result = validate_inputs(args, Op::kCollapseBackward);
  if (dy == nullptr) return result;
  const Axes axes = axes_of(args.layout, args.packed, /*pseudo=*/false);
  const Axes x_axes = axes_of(args.layout, args.packed, /*pseudo=*/true);
  check_like(named("dy", *dy), axes, named("x", args.x), x_axes, 1);
  check_like(named("dx", *dx), x_axes, named("x", args.x), x_axes, result.problem.pseudo_heads);
  check_weight_grad(named("dr", *dr), named("collapse", args.r));
  check_no_alias({named("dx", *dx), named("dr", *dr)},
                 {named("x", args.x), named("collapse", args.r), named("dy", *dy)});
  result.tensors.dy = canonical(*dy, axes);
  result.tensors.dx = canonical(*dx, x_axes);
  result.tensors.dr = *dr;
  return result;
}

namespace {

// The shape of every part and of the merged result, as outs[0] has it.
struct MergeShape {
  Axes axes;
  Named out;
  DType lse_dtype;

  explicit MergeShape(const MergeArgs& args)
      : axes(axes_of(args.layout, args.packed, /*pseudo=*/false)), out(named("outs", first(args))) {
    check_tensor(out, axes.rank(), axes_text(axes, "H", "S", "Dv"));
    check_floating(out);
    check_head_dim("outs", extent(*out.view, axes.dim));
    check_same_device(out, out);
    lse_dtype = out.view->dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  void check(Named part, Named lse) const {
    check_like(part, axes, out, axes, 1);
    const int64_t heads = extent(*out.view, axes.heads), rows = extent(*out.view, axes.seqlen);
    if (axes.batch < 0) {
      check_shape(lse, {heads, rows}, "[H, total]");
    } else {
      check_shape(lse, {extent(*out.view, axes.batch), heads, rows}, "[B, H, S]");
    }
    check_dtype(lse, {lse_dtype}, "LSE is float32, or float64 for float64 outs");
    check_same_device(lse, out);
  }

  void check(const MergeArgs& args, const char* outs, const char* lses) const {
    for (int64_t i = 0; i < args.parts; ++i) check(named(outs, args.outs[i]), named(lses, args.lses[i]));
  }

 private:
  static const TensorView& first(const MergeArgs& args) {
    if (args.parts < 1) refuse("outs", "got no part, expected at least one");
    return args.outs[0];
  }
};

}  // namespace

void validate(const MergeArgs& args, const AttentionOutputs& outputs) {
  const MergeShape shape(args);
  shape.check(args, "outs", "lses");
  shape.check(named("out", outputs.out), named("lse", outputs.lse));
  const Named out = named("out", outputs.out), lse = named("lse", outputs.lse);
  for (int64_t i = 0; i < args.parts; ++i) {
    check_no_alias({out, lse}, {named("outs", args.outs[i]), named("lses", args.lses[i])});
  }
}

void validate(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout, const TensorView* dlse,
              const MergeArgs& grads) {
  const MergeShape shape(args);
  shape.check(args, "outs", "lses");
  shape.check(named("out", outputs.out), named("lse", outputs.lse));
  shape.check(named("dout", dout), dlse != nullptr ? named("dlse", *dlse) : named("lse", outputs.lse));
  shape.check(grads, "douts", "dlses");
  for (int64_t i = 0; i < grads.parts; ++i) {
    const Named dpart = named("douts", grads.outs[i]), dpart_lse = named("dlses", grads.lses[i]);
    check_no_alias({dpart, dpart_lse},
                   {named("out", outputs.out), named("lse", outputs.lse), named("dout", dout), {"dlse", dlse}});
    for (int64_t j = 0; j < args.parts; ++j) {
      check_no_alias({dpart, dpart_lse}, {named("outs", args.outs[j]), named("lses", args.lses[j])});
    }
    for (int64_t j = 0; j < i; ++j) {
      check_no_alias({dpart, dpart_lse}, {named("douts", grads.outs[j]), named("dlses", grads.lses[j])});
    }
  }
}

}  // namespace plait
