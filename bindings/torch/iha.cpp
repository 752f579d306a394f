// Ops premix_forward, premix_backward, collapse_forward and collapse_backward.
// Called by torch's dispatcher through library.cpp.
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
  std::vector<int64_t> shape(args.x.shape.begin(), args.x.shape.begin() + args.x.rank);
  shape.insert(shape.end() - 1, args.w.shape[1]);
  const Tensor y = empty_ordered("x", shape, args.x.dtype, args.x, args.cu_seqlens ? 0 : 1);
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
