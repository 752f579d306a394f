// Implementation of leave.hpp.
#include "cuda/mma/leave.hpp"

#include <fmt/format.h>

namespace plait::cuda::mma {

void leave_mma(const Asked& asked, const Lack& lack, Plan& plan) {
  const bool backend = asked.backend == plan.backend, split = asked.split_size > 0;
  const bool strategy = asked.strategy == Strategy::kSplitKv || asked.strategy == Strategy::kSplitD;
  if (backend || split || strategy) {
    std::string way_out = backend ? "use backend auto or cuda_naive" : "";
    const auto add = [&](const char* what) { way_out += (way_out.empty() ? "" : " and ") + std::string(what); };
    if (strategy) add("use strategy auto");
    if (split) add("leave out split_size");
    throw Error(
        ErrorCode::kUnsupported,
        backend ? "backend"
        : split ? "split_size"
                : "strategy",
        fmt::format("{0} cannot serve this call. required: {1}. supported by {0}: {2}. missing: {3}. way out: {4}",
                    backend_name(plan.backend), lack.required, lack.supported, lack.missing, way_out));
  }
  plan.reasons.push_back(fmt::format("not {}: required {}, supported {}, missing {}", backend_name(plan.backend),
                                     lack.required, lack.supported, lack.missing));
  plan.backend = Backend::kCudaNaive;
}

void leave_mma(const AttentionProblem& problem, const Lack& lack, Plan& plan) {
  leave_mma({problem.backend, problem.strategy, problem.split_size}, lack, plan);
}

}  // namespace plait::cuda::mma
