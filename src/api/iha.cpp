// The public premix and collapse functions: validate, plan, run.
// Called by C++ users, the CLI and the torch shim.
#include "plait/iha.hpp"

#include "api/registry.hpp"
#include "core/validate.hpp"

namespace plait {
namespace {

void run(const ValidatedPremix& call, const Plan& plan, void* workspace, const Executor& executor) {
  api::check_plan(plan, call.problem.fingerprint(), workspace, executor);
  if (call.problem.heads == 0) return;  // no output has an element
  find_implementation(api::registry(), plan.backend).run_premix(plan, call.problem, call.tensors, workspace, executor);
}

void run(const ValidatedCollapse& call, const Plan& plan, void* workspace, const Executor& executor) {
  api::check_plan(plan, call.problem.fingerprint(), workspace, executor);
  if (call.problem.heads == 0) return;
  find_implementation(api::registry(), plan.backend)
      .run_collapse(plan, call.problem, call.tensors, workspace, executor);
}

}  // namespace

Plan plan_premix_forward(const PremixArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

Plan plan_premix_backward(const PremixArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr, nullptr, nullptr).problem, device, api::registry());
}

void premix_forward(const PremixArgs& args, const TensorView& y, const Plan& plan, void* workspace,
                    const Executor& executor) {
  run(validate(args, &y), plan, workspace, executor);
}

void premix_backward(const PremixArgs& args, const TensorView& dy, const TensorView& dx, const TensorView& dw,
                     const Plan& plan, void* workspace, const Executor& executor) {
  run(validate(args, &dy, &dx, &dw), plan, workspace, executor);
}

Plan plan_collapse_forward(const CollapseArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

Plan plan_collapse_backward(const CollapseArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr, nullptr, nullptr).problem, device, api::registry());
}

void collapse_forward(const CollapseArgs& args, const TensorView& y, const Plan& plan, void* workspace,
                      const Executor& executor) {
  run(validate(args, &y), plan, workspace, executor);
}

void collapse_backward(const CollapseArgs& args, const TensorView& dy, const TensorView& dx, const TensorView& dr,
                       const Plan& plan, void* workspace, const Executor& executor) {
  run(validate(args, &dy, &dx, &dr), plan, workspace, executor);
}

}  // namespace plait
