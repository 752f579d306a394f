// `plait bench`: how fast a problem runs here, forward and backward.
// Called by main.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "commands.hpp"
#include "run_attention.hpp"

namespace plait::cli {
namespace {

struct Bench {
  Problem problem;
  int64_t repeats = 10, warmup = 2;
  bool forward_only = false, json = false;
};

struct Timing {
  std::string op;
  Plan plan;
  double median_ms = 0, best_ms = 0, tflops = 0;
};

// Times `repeats` runs after `warmup` untimed ones. `flops` of one run: visible scores only.
Timing measure(const Bench& asked, const Runner& runner, const Plan& plan, double flops,
               const std::function<void()>& body) {
  for (int64_t i = 0; i < asked.warmup; ++i) body();
  std::vector<double> times_ms;
  for (int64_t i = 0; i < asked.repeats; ++i) {
    times_ms.push_back(runner.time_ms(body));
  }
  std::sort(times_ms.begin(), times_ms.end());
  Timing timing{op_name(plan.op), plan, times_ms[times_ms.size() / 2], times_ms.front(), 0};
  timing.tflops = timing.median_ms > 0 ? flops / (timing.median_ms * 1e9) : 0;
  return timing;
}

int bench(const Bench& asked) {
  const Problem& problem = asked.problem;
  finish_problem(problem);
  require_memory(2 * element_count(problem) * static_cast<double>(dtype_bytes(problem.dtype)));
  std::mt19937_64 random(1);
  const Inputs inputs = random_inputs(problem, random, 1);
  Results results = make_results(problem);
  Runner runner(problem, inputs, results);
  const double pairs = problem.visible_pairs(), d = static_cast<double>(problem.head_dim),
               dv = static_cast<double>(problem.value_dim());
  // Two operations for each multiply-add: QK and PV forward; QK, dO V, dS K, dS Q and P dO backward.
  std::vector<Timing> timings{
      measure(asked, runner, results.forward_plan, 2 * pairs * (d + dv), [&] { runner.forward(); })};
  if (!asked.forward_only) {
    timings.push_back(
        measure(asked, runner, results.backward_plan, 2 * pairs * (3 * d + 2 * dv), [&] { runner.backward(); }));
  }
  nlohmann::json rows = nlohmann::json::array();
  std::string table = fmt::format("{:<20} {:>10} {:>9} {:>12} {:>12} {:>10}\n", "op", "backend", "strategy",
                                  "median ms", "best ms", "TFLOP/s");
  for (const Timing& timing : timings) {
    const char *backend = backend_name(timing.plan.backend), *strategy = strategy_name(timing.plan.strategy);
    rows.push_back({{"op", timing.op},
                    {"backend", backend},
                    {"strategy", strategy},
                    {"workers", timing.plan.workers},
                    {"median_ms", timing.median_ms},
                    {"best_ms", timing.best_ms},
                    {"tflops", timing.tflops}});
    table += fmt::format("{:<20} {:>10} {:>9} {:>12.3f} {:>12.3f} {:>10.4f}\n", timing.op, backend, strategy,
                         timing.median_ms, timing.best_ms, timing.tflops);
  }
  if (asked.json) {
    fmt::print(
        "{}\n",
        nlohmann::json({{"problem", problem.describe()}, {"repeats", asked.repeats}, {"timings", rows}}).dump(2));
  } else {
    const Plan& plan = results.forward_plan;
    const std::string where =
        plan.device.kind == DeviceKind::kCuda ? plan.device.name : fmt::format("{} threads", plan.workers);
    fmt::print("{}\n{}, {} repeats\n{}TFLOP/s counts the scores that the mask leaves.\n", problem.describe(), where,
               asked.repeats, table);
  }
  return kExitOk;
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  const auto asked = std::make_shared<Bench>();
  CLI::App* command = app.add_subcommand("bench", "Time attention on this machine, forward and backward");
  add_problem_options(*command, asked->problem);
  add_run_device(*command, asked->problem);
  add_integer(*command, "--repeats", asked->repeats, 1, "timed runs (default 10)", 1000000);
  add_integer(*command, "--warmup", asked->warmup, 0, "untimed runs before them (default 2)", 1000000);
  command->add_flag("--forward-only", asked->forward_only, "no backward");
  command->add_flag("--json", asked->json, "print JSON");
  command->footer(
      "In joint and interleaved mode it times attention over pseudo-heads; premix is not in the times.\n"
      "Examples:\n"
      "  plait bench --seqlen-q 2048 --head-dim 128 --causal\n"
      "  plait bench --seqlen-q 1 --seqlen-kv 32768 --heads 32 --kv-heads 8 --dtype bfloat16 --forward-only\n"
      "  plait bench --device cuda --seqlen-q 4096 --heads 32 --head-dim 128 --dtype bfloat16 --causal\n"
      "  plait bench --mode joint --P 4 --seqlen-q 2048 --causal --window 255 0 --json");
  command->callback([asked, &run] { run = [asked] { return bench(*asked); }; });
}

}  // namespace plait::cli
