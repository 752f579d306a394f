// Attention: arguments to AttentionProblem and AttentionTensors.
// Called by api/attention.cpp.
#include "core/validate.hpp"

#include <cmath>

#include "core/check.hpp"

namespace plait {
namespace {

// Windows beyond any length mean unbounded; the bound keeps row + window inside 64 bits.
constexpr int64_t kWindowLimit = int64_t{1} << 48;

struct Layouts {
  Axes qkv, out;
};

Layouts layouts_of(const AttentionArgs& args) {
  const bool packed = args.cu_seqlens_q.has_value(), pseudo = args.options.mode != HeadMode::kPlain;
  return {axes_of(args.options.layout, packed, pseudo),
          axes_of(args.options.layout, packed, args.options.mode == HeadMode::kInterleaved)};
}

void validate_shapes(const AttentionArgs& args, const Axes& axes) {
  const Named q = named("q", args.q), k = named("k", args.k), v = named("v", args.v);
  const auto expected = [&](const char* heads, const char* seqlen, const char* dim) {
    return axes_text(axes, heads, seqlen, dim);
  };
  check_tensor(q, axes.rank(), expected("Hq", "Sq", "D"));
  check_tensor(k, axes.rank(), expected("Hk", "Sk", "D"));
  check_tensor(v, axes.rank(), expected("Hk", "Sk", "Dv"));
  check_floating(q);
  check_same_dtype(k, q);
  check_same_dtype(v, q);
  check_same_device(q, q);
  check_same_device(k, q);
  check_same_device(v, q);
  if (axes.batch >= 0) {
    check_extent(k, axes.batch, extent(args.q, axes.batch), "the batch of q");
    check_extent(v, axes.batch, extent(args.q, axes.batch), "the batch of q");
  }
  check_extent(k, axes.dim, extent(args.q, axes.dim), "the head dim of q");
  check_extent(v, axes.heads, extent(args.k, axes.heads), "the heads of k");
  check_extent(v, axes.seqlen, extent(args.k, axes.seqlen), "the length of k");
  check_head_dim("q", extent(args.q, axes.dim));
  check_head_dim("v", extent(args.v, axes.dim));
  if (axes.pseudo >= 0) {
    if (extent(args.q, axes.pseudo) < 1)
      refuse("q", fmt::format("got P = 0 in {}, expected at least 1", args.q.shape_string()));
    check_extent(k, axes.pseudo, extent(args.q, axes.pseudo), "the pseudo-heads P of q");
    check_extent(v, axes.pseudo, extent(args.q, axes.pseudo), "the pseudo-heads P of q");
  }
  check_head_groups("k", extent(args.q, axes.heads), extent(args.k, axes.heads));
}

void validate_extras(const AttentionArgs& args, AttentionProblem& problem, AttentionTensors& tensors) {
  const Named q = named("q", args.q);
  if (problem.packed) {
    const Named cu_q = named("cu_seqlens_q", *args.cu_seqlens_q), cu_k = named("cu_seqlens_k", *args.cu_seqlens_k);
    problem.batch = check_cu_seqlens(cu_q, q);
    if (check_cu_seqlens(cu_k, q) != problem.batch) {
      refuse("cu_seqlens_k",
             fmt::format("got {} sequences, expected {} as cu_seqlens_q has", cu_k.view->shape[0] - 1, problem.batch));
    }
    tensors.cu_seqlens_q = static_cast<const int32_t*>(cu_q.view->data);
    tensors.cu_seqlens_kv = static_cast<const int32_t*>(cu_k.view->data);
  }
  if (args.sinks) set_sinks(*args.sinks, q, problem, tensors);
}

// Everything about the inputs; the caller adds the outputs.
ValidatedAttention validate_inputs(const AttentionArgs& args, Op op) {
  const AttentionOptions& options = args.options;
  const Axes axes = layouts_of(args).qkv;
  validate_options(options);
  if (args.cu_seqlens_q.has_value() != args.cu_seqlens_k.has_value()) {
    refuse(args.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q",
           "is missing; packed input needs cu_seqlens_q and cu_seqlens_k");
  }
  validate_shapes(args, axes);
  ValidatedAttention result;
  AttentionProblem& problem = result.problem;
  problem.op = op;
  problem.mode = options.mode;
  problem.mask = options.mask;
  problem.packed = args.cu_seqlens_q.has_value();
  problem.batch = extent(args.q, axes.batch);
  problem.heads_q = extent(args.q, axes.heads);
  problem.heads_kv = extent(args.k, axes.heads);
  problem.seqlen_q = extent(args.q, axes.seqlen);
  problem.seqlen_kv = extent(args.k, axes.seqlen);
  problem.pseudo_heads = extent(args.q, axes.pseudo);
  problem.head_dim = extent(args.q, axes.dim);
  problem.head_dim_v = extent(args.v, axes.dim);
  set_options(options, args.q, problem);
  validate_extras(args, problem, result.tensors);
  result.tensors.q = canonical(args.q, axes);
  result.tensors.k = canonical(args.k, axes);
  result.tensors.v = canonical(args.v, axes);
  return result;
}

void validate_packed_values(const AttentionArgs& args, const AttentionProblem& problem) {
  if (!problem.packed) return;
  check_cu_seqlens_values(named("cu_seqlens_q", *args.cu_seqlens_q), problem.seqlen_q);
  check_cu_seqlens_values(named("cu_seqlens_k", *args.cu_seqlens_k), problem.seqlen_kv);
}

DType lse_dtype(const AttentionProblem& problem) {
  return problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void check_out_like(Named out, const AttentionArgs& args, const AttentionProblem& problem, DType dtype) {
  const Axes axes = layouts_of(args).out;
  check_tensor(out, axes.rank(), axes_text(axes, "Hq", "Sq", "Dv"));
  if (axes.batch >= 0) check_extent(out, axes.batch, problem.batch, "the batch of q");
  check_extent(out, axes.heads, problem.heads_q, "the heads of q");
  check_extent(out, axes.seqlen, problem.seqlen_q, "the length of q");
  if (axes.pseudo >= 0) check_extent(out, axes.pseudo, problem.pseudo_heads, "the pseudo-heads of q");
  check_extent(out, axes.dim, problem.head_dim_v, "the head dim of v");
  check_dtype(out, {dtype}, "the dtype of the inputs, or out_dtype");
  check_same_device(out, named("q", args.q));
}

RowTensor check_lse_like(Named lse, const AttentionArgs& args, const AttentionProblem& problem) {
  const TensorView like = lse_shape(problem);
  if (problem.packed) {
    check_shape(lse, {like.shape[0], like.shape[1]}, "[Hq, rows]");
  } else {
    check_shape(lse, {like.shape[0], like.shape[1], like.shape[2]}, "[B, Hq, rows]");
  }
  check_dtype(lse, {lse_dtype(problem)}, "LSE is float32, or float64 for float64 inputs");
  check_same_device(lse, named("q", args.q));
  const auto& stride = lse.view->stride;
  if (problem.packed) return {lse.view->data, lse.view->dtype, 0, stride[0], stride[1]};
  return {lse.view->data, lse.view->dtype, stride[0], stride[1], stride[2]};
}

void check_grad_like(Named grad, Named input) {
  const std::string why = fmt::format("the shape of {}", input.name);
  check_tensor(grad, input.view->rank, fmt::format("{} ({})", input.view->shape_string(), why));
  for (int axis = 0; axis < input.view->rank; ++axis) check_extent(grad, axis, input.view->shape[axis], why);
  check_same_dtype(grad, input);
  check_same_device(grad, input);
}

}  // namespace

void validate_options(const AttentionOptions& options) {
  // Beyond these, float32 scores overflow or lose every digit.
  constexpr double kLargest = 1e30, kSmallestSoftcap = 1e-30;
  if (options.scale && !(std::abs(*options.scale) <= kLargest)) {
    refuse("scale", fmt::format("got {}, expected a finite number of at most 1e30 in size", *options.scale));
  }
  const bool off = options.softcap == 0.0;
  if (!off && !(options.softcap >= kSmallestSoftcap && options.softcap <= kLargest)) {
    refuse("softcap", fmt::format("got {}, expected a finite number >= 0: 0 (off), or 1e-30 to 1e30", options.softcap));
  }
  for (const auto& [side, value] : {std::pair{"left", options.window_left}, std::pair{"right", options.window_right}}) {
    if (value < -1) refuse("window", fmt::format("got {} = {}, expected -1 (unbounded) or a count >= 0", side, value));
  }
  if (options.split_size < 0) {
    refuse("split_size",
           fmt::format("got {}, expected keys per split, or 0 for the planner's choice", options.split_size));
  }
  if (options.split_size > 0 && options.strategy != Strategy::kAuto && options.strategy != Strategy::kSplitKv) {
    refuse("split_size", fmt::format("got {} with strategy {}; a fixed split needs split_kv (or auto)",
                                     options.split_size, strategy_name(options.strategy)));
  }
  if (options.mask == PseudoMask::kToken && options.mode != HeadMode::kInterleaved) {
    refuse("mask", "got 'token', which only interleaved mode has; use 'flat'");
  }
}

void set_options(const AttentionOptions& options, const TensorView& q, AttentionProblem& problem) {
  problem.dtype = q.dtype;
  problem.out_dtype = options.out_dtype.value_or(q.dtype);
  problem.device = q.device;
  problem.causal = options.causal;
  problem.window_left = options.window_left > kWindowLimit ? -1 : options.window_left;
  problem.window_right = options.window_right > kWindowLimit ? -1 : options.window_right;
  problem.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  problem.softcap = options.softcap;
  problem.deterministic = options.deterministic;
  problem.split_size = options.split_size;
  problem.strategy = options.strategy;
  problem.backend = options.backend;
  if (problem.out_dtype != problem.dtype &&
      (problem.out_dtype != DType::kFloat32 || problem.dtype == DType::kFloat64)) {
    refuse("out_dtype",
           fmt::format("got {} for {} inputs, expected the dtype of the inputs, or float32 from float16 or bfloat16",
                       dtype_name(problem.out_dtype), dtype_name(problem.dtype)));
  }
}

void check_head_groups(const char* argument, int64_t heads_q, int64_t heads_kv) {
  if (heads_kv == 0 ? heads_q != 0 : heads_q % heads_kv != 0) {
    refuse(argument, fmt::format("got {} key/value heads for {} query heads, expected a divisor of {}", heads_kv,
                                 heads_q, heads_q));
  }
}

void set_sinks(const TensorView& view, const Named& q, AttentionProblem& problem, AttentionTensors& tensors) {
  const Named sinks = named("sinks", view);
  check_shape(sinks, {problem.heads_q}, "one logit per query head");
  check_dtype(sinks, {problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32}, "convert the sinks");
  check_same_device(sinks, q);
  problem.has_sinks = true;
  tensors.sinks = view.data;
  tensors.sinks_stride = view.stride[0];
}

void set_outputs(const AttentionArgs& args, const AttentionOutputs& outputs, const AttentionProblem& problem,
                 AttentionTensors& tensors) {
  check_out_like(named("out", outputs.out), args, problem, problem.out_dtype);
  tensors.out = canonical(outputs.out, layouts_of(args).out);
  tensors.lse = check_lse_like(named("lse", outputs.lse), args, problem);
}

TensorView lse_shape(const AttentionProblem& problem) {
  const int64_t rows = problem.seqlen_q * problem.rows_per_position();
  if (problem.packed) return TensorView::contiguous(nullptr, lse_dtype(problem), {problem.heads_q, rows});
  return TensorView::contiguous(nullptr, lse_dtype(problem), {problem.batch, problem.heads_q, rows});
}

ValidatedAttention validate(const AttentionArgs& args, const AttentionOutputs* outputs) {
  ValidatedAttention result = validate_inputs(args, Op::kAttentionForward);
  if (outputs == nullptr) return result;
  set_outputs(args, *outputs, result.problem, result.tensors);
  check_no_alias({named("out", outputs->out), named("lse", outputs->lse)},
                 {named("q", args.q),
                  named("k", args.k),
                  named("v", args.v),
                  {"sinks", view_of(args.sinks)},
                  {"cu_seqlens_q", view_of(args.cu_seqlens_q)},
                  {"cu_seqlens_k", view_of(args.cu_seqlens_k)}});
  validate_packed_values(args, result.problem);
  return result;
}

ValidatedAttention validate(const AttentionBackwardArgs& args, const AttentionGrads* grads) {
  const AttentionArgs& forward = args.forward;
  ValidatedAttention result = validate_inputs(forward, Op::kAttentionBackward);
  AttentionProblem& problem = result.problem;
  AttentionTensors& tensors = result.tensors;
  const Axes out_axes = layouts_of(forward).out;
  // out and dout come in the dtype of the inputs, or fp32 where the forward was asked for it.
  check_dtype(named("out", args.out),
              {problem.dtype, problem.dtype == DType::kFloat64 ? problem.dtype : DType::kFloat32},
              "the dtype of the inputs, or float32");
  problem.out_dtype = args.out.dtype;
  check_out_like(named("out", args.out), forward, problem, problem.out_dtype);
  check_out_like(named("dout", args.dout), forward, problem, problem.out_dtype);
  tensors.out = canonical(args.out, out_axes);
  tensors.dout = canonical(args.dout, out_axes);
  tensors.lse = check_lse_like(named("lse", args.lse), forward, problem);
  if (args.dlse) tensors.dlse = check_lse_like(named("dlse", *args.dlse), forward, problem);
  if (grads == nullptr) return result;
  check_grad_like(named("dq", grads->dq), named("q", forward.q));
  check_grad_like(named("dk", grads->dk), named("k", forward.k));
  check_grad_like(named("dv", grads->dv), named("v", forward.v));
  if (grads->dsinks.has_value() != problem.has_sinks) {
    refuse("dsinks", problem.has_sinks ? "is missing; sinks were given" : "was given without sinks");
  }
  const Axes axes = layouts_of(forward).qkv;
  tensors.dq = canonical(grads->dq, axes);
  tensors.dk = canonical(grads->dk, axes);
  tensors.dv = canonical(grads->dv, axes);
  if (grads->dsinks) {
    check_grad_like(named("dsinks", *grads->dsinks), named("sinks", *forward.sinks));
    tensors.dsinks = grads->dsinks->data;
    tensors.dsinks_stride = grads->dsinks->stride[0];
  }
  check_no_alias(
      {named("dq", grads->dq), named("dk", grads->dk), named("dv", grads->dv), {"dsinks", view_of(grads->dsinks)}},
      {named("q", forward.q),
       named("k", forward.k),
       named("v", forward.v),
       named("out", args.out),
       named("lse", args.lse),
       named("dout", args.dout),
       {"dlse", view_of(args.dlse)},
       {"sinks", view_of(forward.sinks)},
       {"cu_seqlens_q", view_of(forward.cu_seqlens_q)},
       {"cu_seqlens_k", view_of(forward.cu_seqlens_k)}});
  validate_packed_values(forward, problem);
  return result;
}

}  // namespace plait
