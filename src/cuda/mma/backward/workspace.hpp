// Workspace of the tensor-core backward: delta, a RowPair for each row, the sum of dQ; all fp32. Plain C++, no CUDA
// call. Called by the planner (cuda/plan.cpp) and by the kernels of this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "catalog/catalog.hpp"
#include "catalog/mma_backward_tiles.hpp"
#include "core/problem.hpp"
#include "core/rounding.hpp"

namespace plait::cuda::mma {

inline constexpr int64_t kBackwardAlignBytes = 256;

// delta: [batch (1 if packed), heads_q, rows]. RowPairs take twice as much.
inline int64_t backward_delta_bytes(const AttentionProblem& p) {
  const int64_t elems = (p.packed ? 1 : p.batch) * p.heads_q * p.seqlen_q * p.rows_per_position();
  return round_up(elems * 4, kBackwardAlignBytes);
}

// Row tiles of dQ's sum per head and batch entry (packed: per head; a sequence starts a new tile).
inline int64_t backward_dq_slots(const AttentionProblem& p, int64_t tile_rows) {
  const int64_t rows = p.seqlen_q * p.rows_per_position();
  return p.packed ? rows / tile_rows + p.batch + 1 : ceil_div(rows, tile_rows);
}

// Enough for any tile; deterministic calls need no sum of dQ.
inline int64_t backward_workspace_bytes(const AttentionProblem& p) {
  const int64_t row_bytes = 3 * backward_delta_bytes(p);
  if (p.deterministic) return row_bytes;
  const int64_t bucket = catalog::head_dim_bucket(std::max(p.head_dim, p.head_dim_v));
  const int64_t rows = backward_dq_slots(p, catalog::kBackwardMaxStreamRows) * catalog::kBackwardMaxStreamRows;
  return row_bytes + (p.packed ? 1 : p.batch) * p.heads_q * p.joint_passes() * rows * bucket * 4;
}

}  // namespace plait::cuda::mma
