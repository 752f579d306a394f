// The planner: what a problem requires, which backend of the catalog serves it, and the refusal if none does.
// Called by api/ through make_plan(); pure, touches no device and no tensor.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "catalog/catalog.hpp"
#include "core/registry.hpp"

namespace plait {
namespace {

// What an op asks of a backend, in the catalog's terms.
struct Requirement {
  Op op;
  Backend backend;
  DType dtype;
  Device device;
  int64_t head_dim, head_dim_v;
  uint32_t features = 0;
  Strategy strategy = Strategy::kAuto;
  bool strategy_asked = false;                // by name; a split_size asks for split_kv too
  int64_t mixed_heads = 0, pseudo_heads = 0;  // premix and collapse
};

Requirement requirement_of(const AttentionProblem& problem) {
  Requirement need{problem.op, problem.backend, problem.dtype, problem.device, problem.head_dim, problem.head_dim_v};
  const bool windowed = problem.causal || problem.window_left >= 0 || problem.window_right >= 0;
  need.features = (windowed ? catalog::kCausalWindow : 0u) | (problem.softcap > 0 ? catalog::kSoftcap : 0u) |
                  (problem.has_sinks ? catalog::kSinks : 0u) | (problem.packed ? catalog::kPacked : 0u) |
                  (problem.mode != HeadMode::kPlain ? catalog::kPseudoHeads : 0u) |
                  (problem.out_dtype != problem.dtype ? catalog::kOutFloat32 : 0u) |
                  (problem.deterministic ? catalog::kDeterministic : 0u) |
                  (problem.split_size > 0 ? catalog::kFixedSplit : 0u);
  need.strategy = problem.split_size > 0 ? Strategy::kSplitKv : problem.strategy;
  need.strategy_asked = problem.strategy != Strategy::kAuto;
  return need;
}

Requirement requirement_of(const PremixProblem& problem) {
  return {problem.op,
          problem.backend,
          problem.dtype,
          problem.device,
          problem.head_dim,
          problem.head_dim,
          problem.packed ? uint32_t{catalog::kPacked} : 0u,
          Strategy::kAuto,
          false,
          problem.heads,
          problem.pseudo_heads};
}

Requirement requirement_of(const CollapseProblem& problem) {
  return {problem.op, problem.backend, problem.dtype, problem.device, problem.head_dim,    problem.head_dim,
          0u,         Strategy::kAuto, false,         problem.heads,  problem.pseudo_heads};
}

Requirement requirement_of(const KvCacheProblem& problem) {
  Requirement need = requirement_of(problem.attention);
  need.features |= catalog::kKvCache;
  if (problem.attention.page_size > 0) need.features |= catalog::kPaged;
  return need;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : ", ") + part;
  return all.empty() ? "nothing" : all;
}

std::vector<std::string> names_of(uint32_t features) {
  std::vector<std::string> names;
  for (uint32_t bit = 1; bit != 0 && bit <= features; bit <<= 1) {
    if (features & bit) names.emplace_back(catalog::feature_name(static_cast<catalog::Feature>(bit)));
  }
  return names;
}

const char* device_kind_name(DeviceKind kind) { return kind == DeviceKind::kCpu ? "cpu" : "cuda"; }

std::string required_text(const Requirement& need) {
  std::vector<std::string> parts{
      fmt::format("{} on {}", op_name(need.op), device_kind_name(need.device.kind)), dtype_name(need.dtype),
      need.head_dim == need.head_dim_v ? fmt::format("head dim {}", need.head_dim)
                                       : fmt::format("head dims {} and {}", need.head_dim, need.head_dim_v)};
  for (std::string& name : names_of(need.features)) parts.push_back(std::move(name));
  if (need.strategy != Strategy::kAuto) parts.push_back(fmt::format("strategy {}", strategy_name(need.strategy)));
  return joined(parts);
}

std::string supported_text(const catalog::Support& support) {
  std::vector<std::string> dtypes, strategies;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (support.dtypes & catalog::bit(dtype)) dtypes.emplace_back(dtype_name(dtype));
  }
  for (const Strategy strategy : {Strategy::kSplitQ, Strategy::kSplitKv, Strategy::kSplitD}) {
    if (support.strategies & catalog::bit(strategy)) strategies.emplace_back(strategy_name(strategy));
  }
  const int64_t step = support.head_dim_multiple;
  return fmt::format("{} on {}; head dims {} to {}{}; {}; strategies: auto{}{}", joined(dtypes),
                     device_kind_name(support.device), (support.min_head_dim + step - 1) / step * step,
                     support.max_head_dim, step > 1 ? fmt::format(" in multiples of {}", step) : "",
                     joined(names_of(support.features)), strategies.empty() ? "" : ", ",
                     strategies.empty() ? "" : joined(strategies));
}

std::vector<std::string> missing_from(const catalog::Support& support, const Requirement& need,
                                      const DeviceInfo& device) {
  std::vector<std::string> missing = names_of(need.features & ~support.features);
  if (support.device != need.device.kind)
    missing.push_back(fmt::format("{} tensors", device_kind_name(need.device.kind)));
  if (support.device == device.kind && support.min_compute_capability > device.compute_capability) {
    missing.push_back(fmt::format("compute capability {}", support.min_compute_capability));
  } else if (support.max_compute_capability > 0 && support.max_compute_capability < device.compute_capability) {
    missing.push_back(fmt::format("compute capability {} at most", support.max_compute_capability));
  }
  if ((support.dtypes & catalog::bit(need.dtype)) == 0) missing.emplace_back(dtype_name(need.dtype));
  for (const int64_t dim : {need.head_dim, need.head_dim_v}) {
    if (dim > support.max_head_dim || dim % support.head_dim_multiple != 0)
      missing.push_back(fmt::format("head dim {}", dim));
    if (need.head_dim_v == need.head_dim) break;
  }
  const int64_t larger = std::max(need.head_dim, need.head_dim_v);
  const bool named = larger > support.max_head_dim || larger % support.head_dim_multiple != 0;
  if (larger < support.min_head_dim && !named) missing.push_back(fmt::format("head dim {}", larger));
  if (support.max_mixed_heads > 0 && need.mixed_heads > support.max_mixed_heads)
    missing.push_back(fmt::format("{} heads (at most {})", need.mixed_heads, support.max_mixed_heads));
  if (support.max_pseudo_heads > 0 && need.pseudo_heads > support.max_pseudo_heads)
    missing.push_back(fmt::format("{} pseudo-heads (at most {})", need.pseudo_heads, support.max_pseudo_heads));
  if (need.strategy != Strategy::kAuto && (support.strategies & catalog::bit(need.strategy)) == 0) {
    missing.push_back(fmt::format("strategy {}", strategy_name(need.strategy)));
  }
  return missing;
}

// The first row of the catalog that serves `need`. Each row in question that does not goes to `pass_over`, with what it
// lacks.
template <class PassOver>
const catalog::Support* find_support(const Requirement& need, const DeviceInfo& device, PassOver&& pass_over) {
  for (const catalog::Support& support : catalog::supports()) {
    const bool asked = need.backend == support.backend;
    const bool automatic =
        need.backend == Backend::kAuto && support.backend != Backend::kReference && support.device == need.device.kind;
    if (support.op != need.op || !(asked || automatic)) continue;
    const std::vector<std::string> missing = missing_from(support, need, device);
    if (missing.empty()) return &support;
    pass_over(support, missing);
  }
  return nullptr;
}

// What to give up, of the strategy and the backend that were asked for, so that the rest is served.
std::string what_to_give_up(const Requirement& need, const DeviceInfo& device) {
  const auto served = [&](const Requirement& r) {
    return find_support(r, device, [](const auto&, const auto&) {}) != nullptr;
  };
  const bool fixed = (need.features & catalog::kFixedSplit) != 0;
  const char* free_strategy = !fixed                ? "use strategy auto"
                              : need.strategy_asked ? "use strategy auto and leave out split_size"
                                                    : "leave out split_size";
  Requirement r = need;
  r.strategy = Strategy::kAuto, r.features &= ~uint32_t{catalog::kFixedSplit};
  if (need.strategy != Strategy::kAuto && served(r)) return free_strategy;
  r.backend = Backend::kAuto;
  if (need.backend == Backend::kAuto || !served(r)) return "change what is missing";
  r = need;
  r.backend = Backend::kAuto;
  return served(r) ? "use backend auto" : fmt::format("use backend auto and {}", free_strategy);
}

std::string way_out(const Requirement& need, const DeviceInfo& device, bool in_build) {
  const bool on_gpu = need.device.kind == DeviceKind::kCuda;
  if (need.dtype == DType::kFloat64) {
    return on_gpu ? "use float32, or move the tensors to the CPU for backend reference"
                  : "use float32, or backend reference for float64";
  }
  if (need.backend == Backend::kReference && on_gpu) {
    return fmt::format("move the tensors to the CPU, or use backend cuda_naive{}",
                       need.strategy != Strategy::kAuto ? "; and use strategy auto without split_size" : "");
  }
  const bool gpu_backend =
      need.backend != Backend::kAuto && need.backend != Backend::kCpu && need.backend != Backend::kReference;
  if (in_build && gpu_backend && !on_gpu) return "move the tensors to a GPU, or use backend auto";
  return what_to_give_up(need, device);
}

// A row of the catalog that was passed over.
struct Candidate {
  const catalog::Support* support;
  std::vector<std::string> missing;
};

// Of each backend the rows that come closest.
std::string text_of(const std::vector<Candidate>& candidates) {
  std::string text;
  for (auto candidate = candidates.begin(); candidate != candidates.end(); ++candidate) {
    const auto beaten = [&](const Candidate& other) {
      if (other.support->backend != candidate->support->backend) return false;
      const bool earlier = &other < &*candidate;
      return other.missing.size() < candidate->missing.size() || (earlier && other.missing == candidate->missing);
    };
    if (std::any_of(candidates.begin(), candidates.end(), beaten)) continue;
    text += fmt::format("supported by {}: {}. missing: {}. ", backend_name(candidate->support->backend),
                        supported_text(*candidate->support), joined(candidate->missing));
  }
  return text;
}

// Of a backend without a row for the op.
std::string absent_text(const Requirement& need) {
  for (const catalog::Support& support : catalog::supports()) {
    if (support.backend == need.backend) {
      return fmt::format("{} has no {}", backend_name(need.backend), op_name(need.op));
    }
  }
  return fmt::format("{} is not in this build", backend_name(need.backend));
}

const catalog::Support& choose(const Requirement& need, const DeviceInfo& device, std::string& reason) {
  std::vector<Candidate> candidates;
  const catalog::Support* found = find_support(
      need, device, [&](const auto& support, const auto& missing) { candidates.push_back({&support, missing}); });
  const bool asked = need.backend != Backend::kAuto;
  if (found != nullptr) {
    reason = asked ? "backend: asked for" : "backend: the first of the catalog that serves the call";
    return *found;
  }
  const char* argument = asked || need.strategy == Strategy::kAuto ? "backend"
                         : need.features & catalog::kFixedSplit    ? "split_size"
                                                                   : "strategy";
  throw Error(ErrorCode::kUnsupported, argument,
              fmt::format("{} serve this call. required: {}. {}way out: {}",
                          asked ? fmt::format("{} cannot", backend_name(need.backend)) : "no backend of this build can",
                          required_text(need),
                          candidates.empty() ? fmt::format("supported: none. missing: {}. ", absent_text(need))
                                             : text_of(candidates),
                          way_out(need, device, !candidates.empty())));
}

template <class Problem>
Plan begin_plan(const Problem& problem, Device tensors, const DeviceInfo& device, const Requirement& need) {
  if (device.kind != tensors.kind) {
    throw Error(ErrorCode::kInvalidArgument, "device",
                fmt::format("got a plan for {} with tensors on {}", device.name, device_kind_name(tensors.kind)));
  }
  if (device.workers < 1)
    throw Error(ErrorCode::kInvalidArgument, "workers", fmt::format("got {}, expected at least 1", device.workers));
  if (device.kind == DeviceKind::kCuda && (device.multiprocessors < 1 || device.smem_per_block_bytes < 1)) {
    throw Error(
        ErrorCode::kInvalidArgument, "device",
        fmt::format("got {} multiprocessors and {} bytes of shared memory per block, expected at least 1 of each; "
                    "DeviceInfo::by_name and DeviceInfo::cuda fill them",
                    device.multiprocessors, device.smem_per_block_bytes));
  }
  Plan plan;
  std::string reason;
  plan.op = need.op;
  plan.backend = choose(need, device, reason).backend;
  plan.strategy = need.strategy;
  plan.device = device;
  plan.fingerprint = problem.fingerprint();
  plan.reasons.push_back(std::move(reason));
  return plan;
}

Plan finished(Plan plan) {
  if (plan.workspace_bytes < 0) {
    throw Error(ErrorCode::kUnsupported, "workspace", "would take more than 2^63 bytes; give smaller sizes");
  }
  return plan;
}

}  // namespace

const Implementation& find_implementation(Registry registry, Backend backend) {
  for (const Implementation& implementation : registry) {
    if (implementation.backend == backend) return implementation;
  }
  throw Error(ErrorCode::kInternal, "backend",
              fmt::format("{} is in the catalog and not in the registry", backend_name(backend)));
}

Plan make_plan(const AttentionProblem& problem, const DeviceInfo& device, Registry registry) {
  Plan plan = begin_plan(problem, problem.device, device, requirement_of(problem));
  const Implementation& chosen = find_implementation(registry, plan.backend);
  if (chosen.plan_attention != nullptr) chosen.plan_attention(problem, device, plan);
  return finished(std::move(plan));
}

Plan make_plan(const PremixProblem& problem, const DeviceInfo& device, Registry registry) {
  Plan plan = begin_plan(problem, problem.device, device, requirement_of(problem));
  const Implementation& chosen = find_implementation(registry, plan.backend);
  if (chosen.plan_premix != nullptr && problem.heads > 0) chosen.plan_premix(problem, device, plan);
  return finished(std::move(plan));
}

Plan make_plan(std::span<const PremixProblem> problems, const DeviceInfo& device, Registry registry) {
  std::vector<Plan> plans;
  const Implementation* last = registry.data();
  for (const PremixProblem& problem : problems) {
    if (problem.backend != problems[0].backend) {
      throw Error(ErrorCode::kInvalidArgument, "backend",
                  fmt::format("got {} and {}, expected the same for all premixes of a call",
                              backend_name(problems[0].backend), backend_name(problem.backend)));
    }
    plans.push_back(make_plan(problem, device, registry));
    last = std::max(last, &find_implementation(registry, plans.back().backend));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    PremixProblem problem = problems[i];
    problem.backend = last->backend;
    if (plans[i].backend != last->backend) plans[i] = make_plan(problem, device, registry);
  }
  Plan all = plans.front();
  all.fingerprint = fingerprint(problems);
  for (const Plan& plan : plans) {
    all.workers = std::max(all.workers, plan.workers);
    all.workspace_bytes = std::max(all.workspace_bytes, plan.workspace_bytes);
  }
  const bool together = last->plan_premixes != nullptr && last->plan_premixes(problems, device, all);
  all.reasons.push_back(fmt::format("{} premixes, {}", problems.size(), together ? "planned as one" : "in turn"));
  return all;
}

Plan make_plan(const CollapseProblem& problem, const DeviceInfo& device, Registry registry) {
  Plan plan = begin_plan(problem, problem.device, device, requirement_of(problem));
  const Implementation& chosen = find_implementation(registry, plan.backend);
  if (chosen.plan_collapse != nullptr && problem.heads > 0) chosen.plan_collapse(problem, device, plan);
  return finished(std::move(plan));
}

Plan make_plan(const KvCacheProblem& problem, const DeviceInfo& device, Registry registry) {
  Plan plan = begin_plan(problem, problem.attention.device, device, requirement_of(problem));
  const Implementation& chosen = find_implementation(registry, plan.backend);
  if (chosen.plan_kvcache != nullptr) chosen.plan_kvcache(problem, device, plan);
  return finished(std::move(plan));
}

}  // namespace plait
