// Ops premix_forward, premix_backward, premix_qkv_forward, premix_qkv_backward, collapse_forward and collapse_backward.
// Called by torch's dispatcher through library.cpp.
#include <array>

#include "ops.hpp"

namespace plait::torch_shim {
namespace {

struct PremixInputs {
  Tensor x, w;
  MaybeTensor cos, sin, cu_seqlens, cu_seqlens_other;
  Text rope_style, rope_index;
  int64_t rope_offset;
  Text layout, backend;

  PremixArgs args() const {
    PremixArgs args;
    args.x = view_of("x", x);
    args.w = view_of("w", w);
    args.rope = rope_of(view_of("rope cos", cos), view_of("rope sin", sin), rope_style, rope_index, rope_offset);
    args.cu_seqlens = view_of("cu_seqlens", cu_seqlens);
    args.cu_seqlens_other = view_of("cu_seqlens_other", cu_seqlens_other);
    args.layout = parse_layout(layout);
    args.backend = parse_backend(backend.value);
    return args;
  }
};

PremixInputs read_premix(Reader& reader) {
  return {reader.next<Tensor>(),      reader.next<Tensor>(),      reader.next<MaybeTensor>(),
          reader.next<MaybeTensor>(), reader.next<MaybeTensor>(), reader.next<MaybeTensor>(),
          reader.next<Text>(),        reader.next<Text>(),        reader.next<int64_t>(),
          reader.next<Text>(),        reader.next<Text>()};
}

// Premixes of queries (turned by their offset), keys (by 0) and values (not at all).
struct QkvInputs {
  std::array<Tensor, 3> x, w;
  MaybeTensor cos, sin, cu_seqlens_q, cu_seqlens_k;
  Text rope_style, rope_index;
  int64_t rope_offset;
  Text layout, backend;

  std::array<PremixArgs, 3> args() const {
    std::array<PremixArgs, 3> all;
    const auto rope = rope_of(view_of("rope cos", cos), view_of("rope sin", sin), rope_style, rope_index, 0);
    for (size_t i = 0; i < 3; ++i) {
      all[i].x = view_of("x", x[i]);
      all[i].w = view_of("w", w[i]);
      all[i].cu_seqlens = view_of("cu_seqlens", i == 0 ? cu_seqlens_q : cu_seqlens_k);
      all[i].layout = parse_layout(layout);
      all[i].backend = parse_backend(backend.value);
    }
    all[0].cu_seqlens_other = view_of("cu_seqlens_other", cu_seqlens_k);
    all[0].rope = all[1].rope = rope;
    if (rope) all[0].rope->offset = rope_offset;
    // Dense queries without a key see nothing and have no position.
    const bool has_keys = all[1].x.shape[all[1].layout == Layout::kBhsd ? 2 : 1] > 0;
    if (!cu_seqlens_k && !has_keys) all[0].rope.reset();
    return all;
  }
};

QkvInputs read_qkv(Reader& reader) {
  return {{reader.next<Tensor>(), reader.next<Tensor>(), reader.next<Tensor>()},
          {reader.next<Tensor>(), reader.next<Tensor>(), reader.next<Tensor>()},
          reader.next<MaybeTensor>(),
          reader.next<MaybeTensor>(),
          reader.next<MaybeTensor>(),
          reader.next<MaybeTensor>(),
          reader.next<Text>(),
          reader.next<Text>(),
          reader.next<int64_t>(),
          reader.next<Text>(),
          reader.next<Text>()};
}

Tensor empty_premixed(const PremixArgs& args) {
  std::vector<int64_t> shape(args.x.shape.begin(), args.x.shape.begin() + args.x.rank);
  shape.insert(shape.end() - 1, args.w.shape[1]);
  return empty_ordered("x", shape, args.x.dtype, args.x, args.cu_seqlens ? 0 : 1);
}

struct CollapseInputs {
  Tensor x, r;
  bool packed;
  Text layout, backend;

  CollapseArgs args() const {
    return {view_of("x", x), view_of("r", r), packed, parse_layout(layout), parse_backend(backend.value)};
  }
};

CollapseInputs read_collapse(Reader& reader) {
  return {reader.next<Tensor>(), reader.next<Tensor>(), reader.next<bool>(), reader.next<Text>(), reader.next<Text>()};
}

}  // namespace

void premix_forward(Reader& reader, StableIValue* results) {
  const PremixInputs inputs = read_premix(reader);
  const PremixArgs args = inputs.args();
  const Plan plan = plan_premix_forward(args, device_of("x", args.x));
  const Tensor y = empty_premixed(args);
  const Workspace workspace(plan, args.x.device);
  premix_forward(args, view_of("y", y), plan, workspace.data, executor_of(args.x));
  results[0] = from(y);
}

void premix_backward(Reader& reader, StableIValue* results) {
  const Tensor dy = reader.next<Tensor>();
  const PremixInputs inputs = read_premix(reader);
  const PremixArgs args = inputs.args();
  const Plan plan = plan_premix_backward(args, device_of("x", args.x));
  const Tensor dx = empty_like("x", inputs.x), dw = empty_like("w", inputs.w);
  const Workspace workspace(plan, args.x.device);
  premix_backward(args, view_of("dy", dy), view_of("dx", dx), view_of("dw", dw), plan, workspace.data,
                  executor_of(args.x));
  results[0] = from(dx);
  results[1] = from(dw);
}

void premix_qkv_forward(Reader& reader, StableIValue* results) {
  const QkvInputs inputs = read_qkv(reader);
  const std::array<PremixArgs, 3> args = inputs.args();
  const Plan plan = plan_premix_forward(args, device_of("x", args[0].x));
  const std::array<Tensor, 3> y{empty_premixed(args[0]), empty_premixed(args[1]), empty_premixed(args[2])};
  const std::array<TensorView, 3> ys{view_of("y", y[0]), view_of("y", y[1]), view_of("y", y[2])};
  const Workspace workspace(plan, args[0].x.device);
  premix_forward(args, ys, plan, workspace.data, executor_of(args[0].x));
  for (size_t i = 0; i < 3; ++i) results[i] = from(y[i]);
}

void premix_qkv_backward(Reader& reader, StableIValue* results) {
  const std::array<Tensor, 3> dy{reader.next<Tensor>(), reader.next<Tensor>(), reader.next<Tensor>()};
  const QkvInputs inputs = read_qkv(reader);
  const std::array<PremixArgs, 3> args = inputs.args();
  const Plan plan = plan_premix_backward(args, device_of("x", args[0].x));
  std::vector<Tensor> dx, dw;
  std::array<PremixGradients, 3> gradients;
  for (size_t i = 0; i < 3; ++i) {
    dx.push_back(empty_like("x", inputs.x[i]));
    dw.push_back(empty_like("w", inputs.w[i]));
    gradients[i] = {view_of("dy", dy[i]), view_of("dx", dx[i]), view_of("dw", dw[i])};
  }
  const Workspace workspace(plan, args[0].x.device);
  premix_backward(args, gradients, plan, workspace.data, executor_of(args[0].x));
  for (size_t i = 0; i < 3; ++i) results[i] = from(dx[i]), results[3 + i] = from(dw[i]);
}

void collapse_forward(Reader& reader, StableIValue* results) {
  const CollapseInputs inputs = read_collapse(reader);
  const CollapseArgs args = inputs.args();
  const Plan plan = plan_collapse_forward(args, device_of("x", args.x));
  std::vector<int64_t> shape(args.x.shape.begin(), args.x.shape.begin() + args.x.rank);
  shape.erase(shape.end() - 2);
  const Tensor y = empty_ordered("x", shape, args.x.dtype, args.x, args.packed ? 0 : 1);
  const Workspace workspace(plan, args.x.device);
  collapse_forward(args, view_of("y", y), plan, workspace.data, executor_of(args.x));
  results[0] = from(y);
}

void collapse_backward(Reader& reader, StableIValue* results) {
  const Tensor dy = reader.next<Tensor>();
  const CollapseInputs inputs = read_collapse(reader);
  const CollapseArgs args = inputs.args();
  const Plan plan = plan_collapse_backward(args, device_of("x", args.x));
  const Tensor dx = empty_like("x", inputs.x), dr = empty_like("collapse", inputs.r);
  const Workspace workspace(plan, args.x.device);
  collapse_backward(args, view_of("dy", dy), view_of("dx", dx), view_of("dr", dr), plan, workspace.data,
                    executor_of(args.x));
  results[0] = from(dx);
  results[1] = from(dr);
}

}  // namespace plait::torch_shim
