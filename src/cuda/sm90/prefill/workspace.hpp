// What the prefill of cuda_sm90 needs beside its tensors. Plain C++.
// Called by the planner and prefill.hpp's callers.
#pragma once

#include "catalog/catalog.hpp"
#include "core/problem.hpp"

namespace plait::cuda::sm90 {

// Row tiles of problems whose lengths the host does not know go to the block that is free.
inline bool counts_row_tiles(const AttentionProblem& problem) { return problem.packed || problem.cached; }

// The counter of row tiles.
inline int64_t prefill_workspace_bytes(const AttentionProblem& problem) {
  return counts_row_tiles(problem) ? catalog::kWorkspaceAlignBytes : 0;
}

}  // namespace plait::cuda::sm90
