// The public premix and collapse functions: validate, plan, run.
// Called by C++ users, the CLI and the torch shim.
#include "plait/iha.hpp"

#include <fmt/format.h>

#include <array>

#include "api/registry.hpp"
#include "core/check.hpp"
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
      check_same_device({"x", &args[i].x}, {"the first tensor", &args[0].x});
      all.problems.push_back(call.problem);
      all.tensors.push_back(call.tensors);
    } catch (const Error& error) {
      const std::string text = error.what();
      throw Error(error.code(), fmt::format("{}[{}]", error.argument(), i), text.substr(error.argument().size() + 2));
    }
  }
  return all;
}

// Throws where a premix writes what another one reads or writes. `outputs`: of each premix; `dy`: null in a forward
// call.
template <class Outputs, class Dy>
void check_apart(std::span<const PremixArgs> args, const Outputs& outputs, const Dy& dy) {
  const auto numbered = [](const char* name, size_t i) { return fmt::format("{}[{}]", name, i); };
  for (size_t i = 0; i < args.size(); ++i) {
    for (const Named& output : outputs(i)) {
      const std::string name = numbered(output.name, i);
      const auto check = [&](const char* other, size_t j, const TensorView* view) {
        check_no_alias({{name.c_str(), output.view}}, {{numbered(other, j).c_str(), view}});
      };
      for (size_t j = 0; j < args.size(); ++j) {
        if (i == j) continue;
        const PremixArgs& a = args[j];
        check("x", j, &a.x), check("w", j, &a.w), check("dy", j, dy(j));
        if (a.rope) check("rope cos", j, &a.rope->cos), check("rope sin", j, &a.rope->sin);
        if (a.cu_seqlens) check("cu_seqlens", j, &*a.cu_seqlens);
        if (a.cu_seqlens_other) check("cu_seqlens_other", j, &*a.cu_seqlens_other);
        for (const Named& other : outputs(j)) check(other.name, j, other.view);
      }
    }
  }
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
  const Premixes all = validate_all(args, ys.size(), [&](size_t i) { return validate(args[i], &ys[i]); });
  check_apart(
      args, [&](size_t i) { return std::array{Named{"y", &ys[i]}}; },
      [](size_t) -> const TensorView* { return nullptr; });
  run(all, plan, workspace, executor);
}

void premix_backward(std::span<const PremixArgs> args, std::span<const PremixGradients> gradients, const Plan& plan,
                     void* workspace, const Executor& executor) {
  const auto one = [&](size_t i) { return validate(args[i], &gradients[i].dy, &gradients[i].dx, &gradients[i].dw); };
  const Premixes all = validate_all(args, gradients.size(), one);
  check_apart(
      args, [&](size_t i) { return std::array{Named{"dx", &gradients[i].dx}, Named{"dw", &gradients[i].dw}}; },
      [&](size_t i) { return &gradients[i].dy; });
  run(all, plan, workspace, executor);
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
