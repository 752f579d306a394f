// Workspace of the split_d backward: delta and a RowPair for each row, all fp32. Plain C++, no CUDA call.
// Called by the planner (cuda/plan.cpp).
#pragma once

#include "cuda/mma/backward/workspace.hpp"

namespace plait::cuda::mma {

inline int64_t split_d_backward_workspace_bytes(const AttentionProblem& p) { return 3 * backward_delta_bytes(p); }

}  // namespace plait::cuda::mma
