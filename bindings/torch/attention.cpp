// Ops attention_forward, attention_backward, merge_states_forward and merge_states_backward.
// Called by torch's dispatcher through library.cpp.
#include "ops.hpp"

namespace plait::torch_shim {
namespace {

struct AttentionInputs {
  Tensor q, k, v;
  MaybeTensor sinks, cu_seqlens_q, cu_seqlens_k;
  RawOptions options;

  AttentionArgs args() const {
    AttentionArgs args;
    args.options = options.parse();
    args.q = view_of("q", q);
    args.k = view_of("k", k);
    args.v = view_of("v", v);
    args.sinks = view_of("sinks", sinks);
    args.cu_seqlens_q = view_of("cu_seqlens_q", cu_seqlens_q);
    args.cu_seqlens_k = view_of("cu_seqlens_k", cu_seqlens_k);
    return args;
  }
};

AttentionInputs read_inputs(Reader& reader) {
  return {reader.next<Tensor>(),      reader.next<Tensor>(),      reader.next<Tensor>(), reader.next<MaybeTensor>(),
          reader.next<MaybeTensor>(), reader.next<MaybeTensor>(), reader.options()};
}

DType lse_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

struct MergeInputs {
  std::vector<Tensor> outs, lses;
  bool packed;
  Text layout;
};

struct MergeViews {
  std::vector<TensorView> outs, lses;
  MergeArgs args;
};

MergeInputs read_merge(Reader& reader) {
  return {reader.next<std::vector<Tensor>>(), reader.next<std::vector<Tensor>>(), reader.next<bool>(),
          reader.next<Text>()};
}

MergeViews views_of(const MergeInputs& inputs) {
  if (inputs.outs.empty() || inputs.outs.size() != inputs.lses.size()) {
    throw Error(ErrorCode::kInvalidArgument, "lses",
                "got " + std::to_string(inputs.outs.size()) + " outs and " + std::to_string(inputs.lses.size()) +
                    " lses, expected the same number of both, at least one");
  }
  MergeViews views;
  for (const Tensor& out : inputs.outs) views.outs.push_back(view_of("outs", out));
  for (const Tensor& lse : inputs.lses) views.lses.push_back(view_of("lses", lse));
  views.args = {views.outs.data(), views.lses.data(), static_cast<int64_t>(views.outs.size()),
                parse_layout(inputs.layout), inputs.packed};
  return views;
}

}  // namespace

Tensor empty_out(const AttentionArgs& args) {
  const TensorView& q = args.q;
  std::vector<int64_t> shape(q.shape.begin(), q.shape.begin() + q.rank);
  if (args.options.mode == HeadMode::kJoint) shape.pop_back();
  shape.back() = args.v.shape[args.v.rank - 1];
  return empty_ordered("q", shape, args.options.out_dtype.value_or(q.dtype), q, args.cu_seqlens_q ? 0 : 1);
}

Tensor empty_lse(const AttentionArgs& args) {
  const TensorView& q = args.q;
  const int64_t per_position = args.options.mode == HeadMode::kInterleaved ? q.shape[q.rank - 2] : 1;
  std::vector<int64_t> shape;
  if (args.cu_seqlens_q) {
    shape = {q.shape[1], q.shape[0] * per_position};
  } else {
    const bool bhsd = args.options.layout == Layout::kBhsd;
    shape = {q.shape[0], q.shape[bhsd ? 1 : 2], q.shape[bhsd ? 2 : 1] * per_position};
  }
  return empty("q", shape, lse_dtype(q.dtype), q);
}

TensorView expanded_zeros(const TensorView& like) {
  alignas(8) static const unsigned char kZero[8] = {};  // zero in every dtype
  TensorView zeros = like;
  zeros.data = const_cast<unsigned char*>(kZero);
  zeros.stride.fill(0);
  return zeros;
}

Zeros::Zeros(const TensorView& like, bool needed) : view(expanded_zeros(like)) {
  if (!needed || like.device.kind == DeviceKind::kCpu) return;
  memory = empty("out", {1}, like.dtype, like);
  view.data = torch::stable::zero_(*memory).data_ptr();
}

void attention_forward(Reader& reader, StableIValue* results) {
  const AttentionInputs inputs = read_inputs(reader);
  const AttentionArgs args = inputs.args();
  const Plan plan = plan_attention_forward(args, device_of("q", args.q));
  const Tensor out = empty_out(args), lse = empty_lse(args);
  const Workspace workspace(plan, args.q.device);
  attention_forward(args, {view_of("out", out), view_of("lse", lse)}, plan, workspace.data, executor_of(args.q));
  results[0] = from(out);
  results[1] = from(lse);
}

void attention_backward(Reader& reader, StableIValue* results) {
  const MaybeTensor dout = reader.next<MaybeTensor>();
  const Tensor out = reader.next<Tensor>(), lse = reader.next<Tensor>();
  const MaybeTensor dlse = reader.next<MaybeTensor>();
  const AttentionInputs inputs = read_inputs(reader);
  AttentionBackwardArgs args;
  args.forward = inputs.args();
  args.out = view_of("out", out);
  args.lse = view_of("lse", lse);
  const Zeros zeros(args.out, !dout);
  args.dout = dout ? view_of("dout", *dout) : zeros.view;
  args.dlse = view_of("dlse", dlse);
  const Plan plan = plan_attention_backward(args, device_of("q", args.forward.q));
  const Tensor dq = empty_like("q", inputs.q), dk = empty_like("k", inputs.k), dv = empty_like("v", inputs.v);
  // Ops cannot return "no tensor": without sinks dsinks is empty.
  const Tensor dsinks = inputs.sinks ? empty_like("sinks", *inputs.sinks)
                                     : empty("sinks", {0}, lse_dtype(args.forward.q.dtype), args.forward.q);
  const AttentionGrads grads{view_of("dq", dq), view_of("dk", dk), view_of("dv", dv),
                             inputs.sinks ? std::optional(view_of("dsinks", dsinks)) : std::nullopt};
  const Workspace workspace(plan, args.out.device);
  attention_backward(args, grads, plan, workspace.data, executor_of(args.out));
  results[0] = from(dq);
  results[1] = from(dk);
  results[2] = from(dv);
  results[3] = from(dsinks);
}

void merge_states_forward(Reader& reader, StableIValue* results) {
  const MergeInputs inputs = read_merge(reader);
  const MergeViews views = views_of(inputs);
  const TensorView& first = views.outs[0];
  const Tensor out = empty_ordered("outs", {first.shape.begin(), first.shape.begin() + first.rank}, first.dtype, first,
                                   inputs.packed ? 0 : 1);
  const Tensor lse = empty_like("lses", inputs.lses[0]);
  merge_states(views.args, {view_of("out", out), view_of("lse", lse)}, executor_of(first), torch_workers());
  results[0] = from(out);
  results[1] = from(lse);
}

void merge_states_backward(Reader& reader, StableIValue* results) {
  const MaybeTensor dout = reader.next<MaybeTensor>(), dlse = reader.next<MaybeTensor>();
  const Tensor out = reader.next<Tensor>(), lse = reader.next<Tensor>();
  const MergeInputs inputs = read_merge(reader);
  const MergeViews views = views_of(inputs);
  const AttentionOutputs outputs{view_of("out", out), view_of("lse", lse)};
  std::vector<Tensor> douts, dlses;
  std::vector<TensorView> dout_views, dlse_views;
  for (size_t part = 0; part < inputs.outs.size(); ++part) {
    douts.push_back(empty_like("outs", inputs.outs[part]));
    dlses.push_back(empty_like("lses", inputs.lses[part]));
    dout_views.push_back(view_of("douts", douts.back()));
    dlse_views.push_back(view_of("dlses", dlses.back()));
  }
  const Zeros zeros(outputs.out, !dout);
  merge_states_backward(views.args, outputs, dout ? view_of("dout", *dout) : zeros.view, view_of("dlse", dlse),
                        dout_views.data(), dlse_views.data(), executor_of(outputs.out), torch_workers());
  results[0] = from(douts);
  results[1] = from(dlses);
}

}  // namespace plait::torch_shim
