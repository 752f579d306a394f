// Binds each backend's functions to its name: the one place that knows them all.
// Called by the API functions.
#include "api/registry.hpp"

#include <fmt/format.h>

#include <array>

#include "catalog/catalog.hpp"
#include "cpu/cpu.hpp"
#include "cuda/cuda.hpp"
#include "reference/reference.hpp"

namespace plait::api {
namespace {

void run_reference(const Plan&, const AttentionProblem& problem, const AttentionTensors& tensors, void*,
                   const Executor&) {
  (problem.op == Op::kAttentionForward ? reference::attention_forward : reference::attention_backward)(problem,
                                                                                                       tensors);
}
void run_reference(const Plan&, const PremixProblem& problem, const PremixTensors& tensors, void*, const Executor&) {
  (problem.op == Op::kPremixForward ? reference::premix_forward : reference::premix_backward)(problem, tensors);
}
void run_reference(const Plan&, const CollapseProblem& problem, const CollapseTensors& tensors, void*,
                   const Executor&) {
  (problem.op == Op::kCollapseForward ? reference::collapse_forward : reference::collapse_backward)(problem, tensors);
}

void run_reference(const Plan&, const KvCacheProblem& problem, const KvCacheTensors& tensors, void*, const Executor&) {
  reference::attention_with_kvcache(problem, tensors);
}

void run_cpu(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
             const Executor& executor) {
  (problem.op == Op::kAttentionForward ? cpu::attention_forward : cpu::attention_backward)(plan, problem, tensors,
                                                                                           workspace, executor);
}
void run_cpu(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
             const Executor& executor) {
  (problem.op == Op::kPremixForward ? cpu::premix_forward : cpu::premix_backward)(plan, problem, tensors, workspace,
                                                                                  executor);
}
void run_cpu(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
             const Executor& executor) {
  (problem.op == Op::kCollapseForward ? cpu::collapse_forward : cpu::collapse_backward)(plan, problem, tensors,
                                                                                        workspace, executor);
}

constexpr std::array<Implementation, 5> kImplementations{{
    {.backend = Backend::kCpu,
     .plan_attention = cpu::plan_attention,
     .plan_premix = cpu::plan_premix,
     .plan_collapse = cpu::plan_collapse,
     .plan_kvcache = cpu::plan_kvcache,
     .run_attention = run_cpu,
     .run_premix = run_cpu,
     .run_collapse = run_cpu,
     .run_kvcache = cpu::attention_with_kvcache},
    {.backend = Backend::kCudaMma,
     .plan_attention = cuda::plan_attention,
     .plan_premix = cuda::plan_premix,
     .plan_premixes = cuda::plan_premixes,
     .plan_collapse = cuda::plan_collapse,
     .plan_kvcache = cuda::plan_kvcache,
     .run_attention = cuda::run_attention,
     .run_premix = cuda::run_premix,
     .run_premixes = cuda::run_premixes,
     .run_collapse = cuda::run_collapse,
     .run_kvcache = cuda::run_kvcache},
    {.backend = Backend::kCudaSm90,
     .plan_attention = cuda::plan_attention,
     .plan_kvcache = cuda::plan_kvcache,
     .run_attention = cuda::run_attention,
     .run_kvcache = cuda::run_kvcache},
    {.backend = Backend::kCudaNaive,
     .plan_attention = cuda::plan_attention,
     .plan_premix = cuda::plan_premix,
     .plan_collapse = cuda::plan_collapse,
     .plan_kvcache = cuda::plan_kvcache,
     .run_attention = cuda::run_attention,
     .run_premix = cuda::run_premix,
     .run_collapse = cuda::run_collapse,
     .run_kvcache = cuda::run_kvcache},
    {.backend = Backend::kReference,
     .run_attention = run_reference,
     .run_premix = run_reference,
     .run_collapse = run_reference,
     .run_kvcache = run_reference},
}};

}  // namespace

Registry registry() { return kImplementations; }

void check_executor(const Executor& executor, DeviceKind device) {
  if (device == DeviceKind::kCpu && executor.run == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "executor", "has no run function; use Executor::threads() or your own");
  }
}

void check_plan(const Plan& plan, uint64_t fingerprint, const void* workspace, const Executor& executor) {
  check_executor(executor, plan.device.kind);
  if (plan.fingerprint != fingerprint) {
    throw Error(ErrorCode::kInvalidArgument, "plan",
                "was made for other shapes, dtypes or options; plan again with the arguments of this call");
  }
  if (plan.workspace_bytes > 0 && workspace == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "workspace",
                fmt::format("got null, expected {} bytes (plan.workspace_bytes)", plan.workspace_bytes));
  }
  if (reinterpret_cast<uintptr_t>(workspace) % catalog::kWorkspaceAlignBytes != 0) {
    throw Error(ErrorCode::kInvalidArgument, "workspace",
                fmt::format("is not aligned, expected {} bytes of alignment", catalog::kWorkspaceAlignBytes));
  }
}

}  // namespace plait::api
