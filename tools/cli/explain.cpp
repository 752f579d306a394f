// `plait explain`: what would run for a problem, and why, on this machine or on a device that is not here.
// Called by main.cpp.
#include <fmt/format.h>

#include <memory>

#include "commands.hpp"
#include "plait/iha.hpp"
#include "problem.hpp"
#include "run_attention.hpp"

namespace plait::cli {
namespace {

struct Explain {
  Problem problem;
  bool backward = false;
};

// Planning reads no memory; it only wants to see that tensors are there.
TensorView somewhere(const Problem& problem, Slot slot, DType dtype) {
  alignas(64) static char memory[64];
  return problem.view(slot, memory, dtype);
}

AttentionArgs arguments(const Problem& problem) {
  AttentionArgs args;
  args.q = somewhere(problem, Slot::kQuery, problem.dtype);
  args.k = somewhere(problem, Slot::kKey, problem.dtype);
  args.v = somewhere(problem, Slot::kValue, problem.dtype);
  args.options = problem.options;
  const bool wide = problem.dtype == DType::kFloat64;
  if (problem.sinks) args.sinks = somewhere(problem, Slot::kSinks, wide ? DType::kFloat64 : DType::kFloat32);
  if (problem.packed) {
    args.cu_seqlens_q = somewhere(problem, Slot::kCuQuery, DType::kInt32);
    args.cu_seqlens_k = somewhere(problem, Slot::kCuKey, DType::kInt32);
  }
  return args;
}

int explain(const Explain& asked) {
  const Problem& problem = asked.problem;
  finish_problem(problem);
  const DeviceInfo device = problem.device_info();
  const AttentionArgs args = arguments(problem);
  std::string text = problem.describe() + "\n" + plan_attention_forward(args, device).explain();
  if (asked.backward) {
    AttentionBackwardArgs backward;
    backward.forward = without_strategy(args);
    const DType lse = problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    backward.out = somewhere(problem, Slot::kOut, problem.options.out_dtype.value_or(problem.dtype));
    backward.dout = backward.out;
    backward.lse = somewhere(problem, Slot::kLse, lse);
    text += plan_attention_backward(backward, device).explain();
  }
  fmt::print("{}", text);
  return kExitOk;
}

}  // namespace

void add_explain(CLI::App& app, Run& run) {
  const auto asked = std::make_shared<Explain>();
  CLI::App* command = app.add_subcommand("explain", "Print which kernel would run for a problem, and why");
  add_problem_options(*command, asked->problem);
  command->add_flag("--backward", asked->backward, "the backward plan too");
  std::string names;
  for (const std::string& name : DeviceInfo::known_names()) names += (names.empty() ? "" : ", ") + name;
  command->add_option("--device", asked->problem.device,
                      "plan for this device, present or not: " + names + "; or cuda, cuda:N for a GPU of this machine");
  command->footer(
      "Examples:\n"
      "  plait explain --seqlen-q 4096 --causal\n"
      "  plait explain --seqlen-q 1 --seqlen-kv 32768 --heads 32 --kv-heads 8 --head-dim 128 --dtype bfloat16\n"
      "  plait explain --device h200 --seqlen-q 4096 --head-dim 128 --dtype bfloat16 --causal --backward\n"
      "  plait explain --mode joint --P 4 --seqlen-q 8192 --causal --window 1023 0 --backward");
  command->callback([asked, &run] { run = [asked] { return explain(*asked); }; });
}

}  // namespace plait::cli
