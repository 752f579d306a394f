// The public attention functions: validate, plan, run.
// Called by C++ users, the CLI and the torch shim.
#include "plait/attention.hpp"

#include "api/registry.hpp"
#include "core/validate.hpp"

namespace plait {
namespace {

void run(const ValidatedAttention& call, const Plan& plan, void* workspace, const Executor& executor) {
  api::check_plan(plan, call.problem.fingerprint(), workspace, executor);
  find_implementation(api::registry(), plan.backend)
      .run_attention(plan, call.problem, call.tensors, workspace, executor);
}

}  // namespace

Plan plan_attention_forward(const AttentionArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

Plan plan_attention_backward(const AttentionBackwardArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

void attention_forward(const AttentionArgs& args, const AttentionOutputs& outputs, const Plan& plan, void* workspace,
                       const Executor& executor) {
  run(validate(args, &outputs), plan, workspace, executor);
}

void attention_backward(const AttentionBackwardArgs& args, const AttentionGrads& grads, const Plan& plan,
                        void* workspace, const Executor& executor) {
  run(validate(args, &grads), plan, workspace, executor);
}

}  // namespace plait
