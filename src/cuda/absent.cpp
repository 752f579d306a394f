// What a build without CUDA has in place of the kernels: refusals that say how to get them.
// Compiled by CMakeLists.txt when PLAIT_CUDA is off.
#include "cuda/cuda.hpp"

namespace plait::cuda {
namespace {

[[noreturn]] void refuse_call() {
  throw Error(ErrorCode::kUnsupported, "device",
              "this build has no CUDA kernels; install a build with them (PLAIT_CUDA=ON, needs nvcc 13), or move the "
              "tensors to the CPU");
}

}  // namespace

bool built() { return false; }
DeviceInfo device_info(int32_t /*index*/) { refuse_call(); }
int32_t device_count() noexcept { return 0; }

void run_attention(const Plan&, const AttentionProblem&, const AttentionTensors&, void*, const Executor&) {
  refuse_call();
}
void run_premix(const Plan&, const PremixProblem&, const PremixTensors&, void*, const Executor&) { refuse_call(); }
void run_premixes(const Plan&, std::span<const PremixProblem>, std::span<const PremixTensors>, void*, const Executor&) {
  refuse_call();
}
void run_collapse(const Plan&, const CollapseProblem&, const CollapseTensors&, void*, const Executor&) {
  refuse_call();
}
void run_kvcache(const Plan&, const KvCacheProblem&, const KvCacheTensors&, void*, const Executor&) { refuse_call(); }

void merge_states(const MergeArgs&, const AttentionOutputs&, const Executor&) { refuse_call(); }
void merge_states_backward(const MergeArgs&, const AttentionOutputs&, const TensorView&, const TensorView*,
                           const TensorView*, const TensorView*, const Executor&) {
  refuse_call();
}

}  // namespace plait::cuda
