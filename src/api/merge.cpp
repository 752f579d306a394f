// The public merge_states functions: validate, run.
// Called by C++ users, the C API and the torch shim.
#include "api/registry.hpp"
#include "core/check.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"

namespace plait {
namespace {

void refuse_float64_on_gpu(const AttentionOutputs& outputs) {
  if (outputs.out.device.kind == DeviceKind::kCuda && outputs.out.dtype == DType::kFloat64) {
    throw Error(ErrorCode::kUnsupported, "outs",
                "got float64 on a GPU, expected float32, float16 or bfloat16; move them to the CPU");
  }
}

// Whether the tensors are on a GPU; on the CPU the executor must be able to run `workers`.
bool on_gpu(const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  const DeviceKind kind = outputs.out.device.kind;
  api::check_executor(executor, kind);
  refuse_float64_on_gpu(outputs);
  if (kind != DeviceKind::kCuda && workers < 1) refuse("workers", fmt::format("got {}, expected at least 1", workers));
  return kind == DeviceKind::kCuda;
}

}  // namespace

void check_merge_states(const MergeArgs& args, const AttentionOutputs& outputs) {
  validate(args, outputs);
  refuse_float64_on_gpu(outputs);
}

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  validate(args, outputs);
  if (on_gpu(outputs, executor, workers)) return cuda::merge_states(args, outputs, executor);
  cpu::merge_states(args, outputs, executor, workers);
}

void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const std::optional<TensorView>& dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor, int32_t workers) {
  const TensorView* from_lse = view_of(dlse);
  validate(args, outputs, dout, from_lse, {douts, dlses, args.parts, args.layout, args.packed});
  if (on_gpu(outputs, executor, workers)) {
    return cuda::merge_states_backward(args, outputs, dout, from_lse, douts, dlses, executor);
  }
  cpu::merge_states_backward(args, outputs, dout, from_lse, douts, dlses, executor, workers);
}

}  // namespace plait
