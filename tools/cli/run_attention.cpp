// Tensors of a problem and calls into libplait.
// Called through run_attention.hpp.
#include "run_attention.hpp"

#include <chrono>

namespace plait::cli {
namespace {

DType lse_dtype(const Problem& problem) { return problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

DType out_dtype(const Problem& problem) { return problem.options.out_dtype.value_or(problem.dtype); }

Tensor equal_sequences(const Problem& problem, Slot slot, int64_t length) {
  Tensor tensor = make_tensor(problem, slot, DType::kInt32);
  std::vector<double> begins;
  for (int64_t b = 0; b <= problem.batch; ++b) begins.push_back(static_cast<double>(b * length));
  set_values(tensor, begins);
  return tensor;
}

std::optional<TensorView> view_if(bool given, const Tensor& tensor) {
  return given ? std::optional<TensorView>(tensor.view) : std::nullopt;
}

}  // namespace

double element_count(const Problem& problem) {
  double elements = 0;
  for (const Slot slot : {Slot::kQuery, Slot::kKey, Slot::kValue, Slot::kOut, Slot::kLse}) {
    elements += static_cast<double>(problem.view(slot, nullptr, problem.dtype).numel());
  }
  return elements;
}

Inputs random_inputs(const Problem& problem, std::mt19937_64& random, double q_factor) {
  Inputs inputs;
  const auto normal = [&](Slot slot, DType dtype, double factor) {
    Tensor tensor = make_tensor(problem, slot, dtype);
    fill_normal(tensor, random, factor);
    return tensor;
  };
  inputs.q = normal(Slot::kQuery, problem.dtype, q_factor);
  inputs.k = normal(Slot::kKey, problem.dtype, 1);
  inputs.v = normal(Slot::kValue, problem.dtype, 1);
  inputs.dout = normal(Slot::kOut, out_dtype(problem), 1);
  inputs.dlse = normal(Slot::kLse, lse_dtype(problem), 1);
  if (problem.sinks) inputs.sinks = normal(Slot::kSinks, lse_dtype(problem), 1);
  if (problem.packed) {
    inputs.cu_q = equal_sequences(problem, Slot::kCuQuery, problem.seqlen_q);
    inputs.cu_k = equal_sequences(problem, Slot::kCuKey, problem.kv_length());
  }
  return inputs;
}

Inputs to_float64(const Inputs& inputs) {
  const auto wide = [](const Tensor& tensor) { return converted(tensor, DType::kFloat64); };
  const auto same = [](const Tensor& tensor) { return converted(tensor, tensor.view.dtype); };
  return {.q = wide(inputs.q),
          .k = wide(inputs.k),
          .v = wide(inputs.v),
          .sinks = wide(inputs.sinks),
          .cu_q = same(inputs.cu_q),
          .cu_k = same(inputs.cu_k),
          .dout = wide(inputs.dout),
          .dlse = wide(inputs.dlse)};
}

Results make_results(const Problem& problem) {
  Results results;
  results.out = make_tensor(problem, Slot::kOut, out_dtype(problem));
  results.lse = make_tensor(problem, Slot::kLse, lse_dtype(problem));
  results.dq = make_tensor(problem, Slot::kQuery, problem.dtype);
  results.dk = make_tensor(problem, Slot::kKey, problem.dtype);
  results.dv = make_tensor(problem, Slot::kValue, problem.dtype);
  if (problem.sinks) results.dsinks = make_tensor(problem, Slot::kSinks, lse_dtype(problem));
  return results;
}

AttentionArgs attention_args(const Problem& problem, const Inputs& inputs) {
  return {.q = inputs.q.view,
          .k = inputs.k.view,
          .v = inputs.v.view,
          .sinks = view_if(problem.sinks, inputs.sinks),
          .cu_seqlens_q = view_if(problem.packed, inputs.cu_q),
          .cu_seqlens_k = view_if(problem.packed, inputs.cu_k),
          .options = problem.options};
}

AttentionArgs without_strategy(AttentionArgs args) {
  args.options.strategy = Strategy::kAuto;
  args.options.split_size = 0;
  return args;
}

AttentionBackwardArgs backward_args(const Problem& problem, const Inputs& inputs, const Results& results) {
  return {.forward = without_strategy(attention_args(problem, inputs)),
          .out = results.out.view,
          .lse = results.lse.view,
          .dout = inputs.dout.view,
          .dlse = inputs.dlse.view};
}

Runner::Runner(const Problem& problem, const Inputs& inputs, Results& results)
    : args_(attention_args(problem, inputs)),
      backward_args_(backward_args(problem, inputs, results)),
      outputs_{results.out.view, results.lse.view},
      grads_{results.dq.view, results.dk.view, results.dv.view, view_if(problem.sinks, results.dsinks)},
      results_(results) {
  const DeviceInfo device = problem.device_info();
  if (device.kind == DeviceKind::kCuda) move_to_gpu(problem, inputs);
  results_.forward_plan = plan_attention_forward(args_, device);
  results_.backward_plan = plan_attention_backward(backward_args_, device);
  const int64_t forward_bytes = results_.forward_plan.workspace_bytes,
                backward_bytes = results_.backward_plan.workspace_bytes;
  if (gpu_) {
    forward_workspace_ = gpu_->allocate(forward_bytes), backward_workspace_ = gpu_->allocate(backward_bytes);
    return;
  }
  require_memory(static_cast<double>(forward_bytes + backward_bytes));
  host_forward_ = Buffer(forward_bytes), host_backward_ = Buffer(backward_bytes);
  forward_workspace_ = host_forward_.data(), backward_workspace_ = host_backward_.data();
}

void Runner::move_to_gpu(const Problem& problem, const Inputs& inputs) {
  gpu_.emplace(problem.gpu_index());
  const auto copied = [this](const Tensor& tensor) {
    TensorView view = tensor.view;
    view.device = {DeviceKind::kCuda, gpu_->index()};
    if (view.data == nullptr) return view;
    const int64_t bytes = view.numel() * dtype_bytes(view.dtype);
    view.data = gpu_->allocate(bytes);
    gpu_->upload(view.data, tensor.view.data, bytes);
    return view;
  };
  const auto output = [&](const Tensor& tensor) {
    const TensorView view = copied(tensor);
    on_gpu_.emplace_back(&tensor, view.data);
    return view;
  };
  args_.q = copied(inputs.q), args_.k = copied(inputs.k), args_.v = copied(inputs.v);
  if (args_.sinks) args_.sinks = copied(inputs.sinks);
  if (args_.cu_seqlens_q) args_.cu_seqlens_q = copied(inputs.cu_q), args_.cu_seqlens_k = copied(inputs.cu_k);
  outputs_ = {output(results_.out), output(results_.lse)};
  backward_args_ = {.forward = without_strategy(args_),
                    .out = outputs_.out,
                    .lse = outputs_.lse,
                    .dout = copied(inputs.dout),
                    .dlse = copied(inputs.dlse)};
  grads_ = {output(results_.dq), output(results_.dk), output(results_.dv),
            grads_.dsinks ? std::optional(output(results_.dsinks)) : std::nullopt};
}

void Runner::forward() { attention_forward(args_, outputs_, results_.forward_plan, forward_workspace_, executor()); }

void Runner::backward() {
  attention_backward(backward_args_, grads_, results_.backward_plan, backward_workspace_, executor());
}

Executor Runner::executor() const { return gpu_ ? Executor::on_stream(nullptr) : Executor::threads(); }

void Runner::collect() {
  for (const auto& [tensor, data] : on_gpu_) {
    gpu_->download(tensor->view.data, data, tensor->view.numel() * dtype_bytes(tensor->view.dtype));
  }
}

double Runner::time_ms(const std::function<void()>& body) const {
  if (gpu_) return gpu_->time_ms(body);
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace plait::cli
