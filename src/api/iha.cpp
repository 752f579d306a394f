// The public premix and collapse functions: validate, plan, run.
// Called by C++ users, the CLI and the torch shim.
#include "plait/iha.hpp"

#include <fmt/format.h>

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

struct Premixes {
  std::vector<PremixProblem> problems;
  std::vector<PremixTensors> tensors;
};

// validate(i) of `count` premixes on one device.
template <class Validate>
Premixes validate_all(std::span<const PremixArgs> args, size_t count, const Validate& validate) {
  if (args.empty()) throw Error(ErrorCode::kInvalidArgument, "args", "got no premix, expected at least one");
  if (count != args.size()) {
    throw Error(ErrorCode::kInvalidArgument, "args",
                fmt::format("got {} premixes and results of {}, expected as many", args.size(), count));
  }
  Premixes all;
  for (size_t i = 0; i < count; ++i) {
    try {
      const ValidatedPremix call = validate(i);
      const Device device = call.problem.device;
      if (i > 0 && !(device == all.problems[0].device)) {
        throw Error(ErrorCode::kInvalidArgument, "x", "is on another device than x of the first premix");
      }
      all.problems.push_back(call.problem);
      all.tensors.push_back(call.tensors);
    } catch (const Error& error) {
      const std::string text = error.what();
      throw Error(error.code(), fmt::format("{}[{}]", error.argument(), i), text.substr(error.argument().size() + 2));
    }
  }
  return all;
}

void run(const Premixes& all, const Plan& plan, void* workspace, const Executor& executor) {
  api::check_plan(plan, fingerprint(all.problems), workspace, executor);
  const Implementation& backend = find_implementation(api::registry(), plan.backend);
  Plan together = plan;
  if (backend.plan_premixes != nullptr && backend.plan_premixes(all.problems, plan.device, together)) {
    return backend.run_premixes(plan, all.problems, all.tensors, workspace, executor);
  }
  for (size_t i = 0; i < all.problems.size(); ++i) {
    PremixProblem problem = all.problems[i];
    problem.backend = plan.backend;
    if (problem.heads == 0) continue;
    backend.run_premix(make_plan(problem, plan.device, api::registry()), problem, all.tensors[i], workspace, executor);
  }
}

}  // namespace

Plan plan_premix_forward(std::span<const PremixArgs> args, const DeviceInfo& device) {
  const auto one = [&](size_t i) { return validate(args[i], nullptr); };
  return make_plan(validate_all(args, args.size(), one).problems, device, api::registry());
}

Plan plan_premix_backward(std::span<const PremixArgs> args, const DeviceInfo& device) {
  const auto one = [&](size_t i) { return validate(args[i], nullptr, nullptr, nullptr); };
  return make_plan(validate_all(args, args.size(), one).problems, device, api::registry());
}

void premix_forward(std::span<const PremixArgs> args, std::span<const TensorView> ys, const Plan& plan, void* workspace,
                    const Executor& executor) {
  run(validate_all(args, ys.size(), [&](size_t i) { return validate(args[i], &ys[i]); }), plan, workspace, executor);
}

void premix_backward(std::span<const PremixArgs> args, std::span<const PremixGradients> gradients, const Plan& plan,
                     void* workspace, const Executor& executor) {
  const auto one = [&](size_t i) { return validate(args[i], &gradients[i].dy, &gradients[i].dx, &gradients[i].dw); };
  run(validate_all(args, gradients.size(), one), plan, workspace, executor);
}

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
