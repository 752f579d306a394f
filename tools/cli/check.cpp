// `plait check`: a backend against the float64 oracle on fresh random numbers, held to the accuracy bars.
// Called by main.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "commands.hpp"
#include "compare.hpp"
#include "eager.hpp"
#include "run_attention.hpp"

namespace plait::cli {
namespace {

// q times this makes the softmax peaky (docs/numerics.md).
constexpr double kPeakyFactor = 4;

// The bars of the rms error hold where roundings average out: over this many keys a row (64 under a causal mask), rows
// and dims. Below, a sum that nearly cancels can be all there is, and eager attention's own error is the measure; with
// a factor, since over few numbers that is a matter of luck.
constexpr double kScopeKeys = 32, kScopeRows = 64, kEagerRmsFactor = 4;
constexpr int64_t kScopeHeadDim = 16;

struct Check {
  Problem problem;
  std::optional<int64_t> seed;
  double bar_factor = 1;
  bool peaky = false, forward_only = false, json = false;
};

EagerInputs eager_inputs(const Problem& problem, const Inputs& inputs) {
  return {values_of(inputs.q),    values_of(inputs.k),
          values_of(inputs.v),    problem.sinks ? values_of(inputs.sinks) : std::vector<double>{},
          values_of(inputs.dout), values_of(inputs.dlse)};
}

bool averages_out(const Problem& problem) {
  const double rows = static_cast<double>(problem.batch * problem.heads * problem.rows());
  return rows >= kScopeRows && problem.visible_pairs() >= kScopeKeys * rows &&
         std::min(problem.head_dim, problem.value_dim()) >= kScopeHeadDim;
}

std::vector<Comparison> compare_all(const Check& asked, const Inputs& inputs, const Results& got,
                                    const Results& oracle) {
  const Problem& problem = asked.problem;
  const EagerResults eager = eager_attention(problem, eager_inputs(problem, inputs));
  std::vector<Comparison> rows;
  const double factor = asked.bar_factor;
  const bool scoped = averages_out(problem);
  const auto add = [&rows, factor, scoped](const char* name, const Tensor& a, const Tensor& b,
                                           const std::vector<double>& rounded, double rms_limit) {
    const std::vector<double> expected = values_of(b);
    if (!scoped) rms_limit = std::max(rms_limit, kEagerRmsFactor * relative_rms(rounded, expected));
    rows.push_back(compare(name, values_of(a), expected, factor * max_abs_bar(rounded, expected, a.view.dtype),
                           factor * rms_limit));
  };
  add("out", got.out, oracle.out, eager.out, rms_bar(problem.dtype, Kind::kForward));
  // LSE is fp32 whatever the inputs are.
  add("lse", got.lse, oracle.lse, eager.lse, rms_bar(DType::kFloat32, Kind::kForward));
  if (asked.forward_only) return rows;
  add("dq", got.dq, oracle.dq, eager.dq, rms_bar(problem.dtype, Kind::kOtherGrad));
  add("dk", got.dk, oracle.dk, eager.dk, rms_bar(problem.dtype, Kind::kOtherGrad));
  add("dv", got.dv, oracle.dv, eager.dv, rms_bar(problem.dtype, Kind::kValueGrad));
  if (problem.sinks && problem.heads > 0) {
    // A few numbers, each a sum that cancels: judged by how far rounding can carry it.
    constexpr double kSigmas = 6;
    const double sigma = *std::max_element(eager.dsinks_sigma.begin(), eager.dsinks_sigma.end());
    rows.push_back(
        compare("dsinks", values_of(got.dsinks), values_of(oracle.dsinks), factor * kSigmas * sigma, std::nullopt));
  }
  return rows;
}

nlohmann::json as_json(const std::vector<Comparison>& rows) {
  nlohmann::json all = nlohmann::json::array();
  for (const Comparison& row : rows) {
    nlohmann::json one = {{"output", row.name},
                          {"max_abs", row.max_abs},
                          {"max_abs_bar", row.max_abs_bar},
                          {"rms", row.rms},
                          {"passed", row.passed}};
    if (row.rms_bar) one["rms_bar"] = *row.rms_bar;
    all.push_back(std::move(one));
  }
  return all;
}

std::string as_table(const std::vector<Comparison>& rows) {
  std::string table = fmt::format("{:<8} {:>11} {:>11} {:>11} {:>11}\n", "output", "max abs", "bar", "rms rel", "bar");
  for (const Comparison& row : rows) {
    const std::string limit = row.rms_bar ? fmt::format("{:.3e}", *row.rms_bar) : "-";
    table += fmt::format("{:<8} {:>11.3e} {:>11.3e} {:>11.3e} {:>11}  {}\n", row.name, row.max_abs, row.max_abs_bar,
                         row.rms, limit, row.passed ? "ok" : "FAILED");
  }
  return table;
}

int check(Check asked) {
  Problem& problem = asked.problem;
  finish_problem(problem);
  if (!(asked.bar_factor >= 0)) {
    throw CLI::ValidationError("--bar-factor", fmt::format("got {}, expected 0 or more", asked.bar_factor));
  }
  if (problem.options.backend == Backend::kReference || problem.dtype == DType::kFloat64) {
    throw Error(ErrorCode::kInvalidArgument, problem.dtype == DType::kFloat64 ? "dtype" : "backend",
                "the float64 reference is the oracle itself; check another backend in float16, bfloat16 or float32");
  }
  // Tensors and their gradients, their float64 copies, and the numbers that are compared.
  constexpr double kBytesPerElement = 96;
  require_memory(kBytesPerElement * element_count(problem));
  const auto seed = static_cast<uint64_t>(asked.seed.value_or(std::random_device{}()));
  std::mt19937_64 random(seed);
  const Inputs inputs = random_inputs(problem, random, asked.peaky ? kPeakyFactor : 1);
  Results got = make_results(problem);
  Runner runner(problem, inputs, got);

  Problem wide = problem;
  wide.dtype = DType::kFloat64;
  wide.device = "cpu";
  wide.options.out_dtype.reset();
  wide.options.backend = Backend::kReference;
  wide.options.strategy = Strategy::kAuto;
  wide.options.split_size = 0;
  const Inputs wide_inputs = to_float64(inputs);
  Results oracle = make_results(wide);
  Runner oracle_runner(wide, wide_inputs, oracle);

  runner.forward();
  runner.collect();
  const std::vector<double> first = values_of(got.out);
  runner.forward();
  runner.collect();
  const bool repeats = std::equal(first.begin(), first.end(), values_of(got.out).begin(), [](double a, double b) {
    return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
  });
  oracle_runner.forward();
  if (!asked.forward_only) {
    runner.backward();
    runner.collect();
    oracle_runner.backward();
  }
  const std::vector<Comparison> rows = compare_all(asked, inputs, got, oracle);
  bool passed = repeats;
  for (const Comparison& row : rows) passed = passed && row.passed;

  if (asked.json) {
    fmt::print("{}\n", nlohmann::json({{"problem", problem.describe()},
                                       {"backend", backend_name(got.forward_plan.backend)},
                                       {"seed", seed},
                                       {"repeats", repeats},
                                       {"passed", passed},
                                       {"outputs", as_json(rows)}})
                           .dump(2));
  } else {
    fmt::print("{}\nbackend {} against the float64 reference, seed {}\n{}forward run twice: {}\n{}\n",
               problem.describe(), backend_name(got.forward_plan.backend), seed, as_table(rows),
               repeats ? "bit-equal" : "NOT bit-equal", passed ? "check passed" : "check FAILED");
  }
  return passed ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, Run& run) {
  const auto asked = std::make_shared<Check>();
  asked->problem.batch = 2;
  asked->problem.heads = 4;
  asked->problem.seqlen_q = 257;
  CLI::App* command =
      app.add_subcommand("check", "Run a backend against the float64 oracle and hold it to the accuracy bars");
  add_problem_options(*command, asked->problem);
  add_run_device(*command, asked->problem);
  add_integer(*command, "--seed", asked->seed, 0, "seed of the random numbers (default: a fresh one, printed)");
  command->add_flag("--peaky", asked->peaky, "multiply q by 4: few keys take most of the weight");
  add_real(*command, "--bar-factor", asked->bar_factor, "multiply every bar by this (default 1)");
  command->add_flag("--forward-only", asked->forward_only, "no gradients");
  command->add_flag("--json", asked->json, "print JSON");
  command->footer(
      "The oracle is slow: keep shapes small.\n"
      "max abs: at most twice the error of eager attention in the same dtype, plus one rounding of the output.\n"
      "rms rel: root-mean-square error over the root mean square of the oracle; its bars are for 32 visible keys a row "
      "(on average), 64 rows and head dims of 16 or more, and rise to four times eager attention's error below.\n"
      "Examples:\n"
      "  plait check --causal --dtype bfloat16\n"
      "  plait check --mode joint --P 4 --causal --window 63 0 --kv-heads 2\n"
      "  plait check --head-dim 80 --head-dim-v 48 --softcap 20 --sinks --peaky --seed 7");
  command->callback([asked, &run] { run = [asked] { return check(*asked); }; });
}

}  // namespace plait::cli
