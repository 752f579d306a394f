// What the prefill of cuda_sm90 needs beside its tensors. Plain C++.
// Called by the planner and prefill.hpp's callers.
#pragma once

#include "catalog/catalog.hpp"
#include "core/problem.hpp"

namespace plait::cuda::sm90 {

// A counter: row tiles of packed problems, whose lengths the host does not know, go to the block that is free.
inline int64_t prefill_workspace_bytes(const AttentionProblem& problem) {
  return problem.packed ? catalog::kWorkspaceAlignBytes : 0;
}

}  // namespace plait::cuda::sm90
