// The public merge_states functions: validate, run.
// Called by C++ users, the C API and the torch shim.
#include "api/registry.hpp"
#include "core/check.hpp"
#include "core/validate.hpp"
#include "cpu/cpu.hpp"

namespace plait {
namespace {

void check_host(const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  api::check_executor(executor);
  if (outputs.out.device.kind != DeviceKind::kCpu) {
    throw Error(ErrorCode::kUnsupported, "outs",
                "got tensors on a GPU, and merge_states has no kernel for one in this build; move them to the CPU");
  }
  if (workers < 1) refuse("workers", fmt::format("got {}, expected at least 1", workers));
}

}  // namespace

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  validate(args, outputs);
  check_host(outputs, executor, workers);
  cpu::merge_states(args, outputs, executor, workers);
}

void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const std::optional<TensorView>& dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor, int32_t workers) {
  const TensorView* from_lse = view_of(dlse);
  validate(args, outputs, dout, from_lse, {douts, dlses, args.parts, args.layout, args.packed});
  check_host(outputs, executor, workers);
  cpu::merge_states_backward(args, outputs, dout, from_lse, douts, dlses, executor, workers);
}

}  // namespace plait
