// Workspace of cuda_naive and the cut of a weight gradient: plain C++, no CUDA call.
// Called by the planner (plan.cpp) and by the kernels of this folder.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "core/rounding.hpp"

namespace plait::cuda::naive {

inline constexpr int kTile = 64;  // softmax rows, keys, and rows and columns of a weight gradient, of a tile

// delta, fp32 [batch (1 if packed), heads_q, softmax rows].
inline int64_t attention_backward_workspace_bytes(const AttentionProblem& p) {
  return (p.packed ? 1 : p.batch) * p.heads_q * p.seqlen_q * p.rows_per_position() *
         static_cast<int64_t>(sizeof(float));
}

// A weight gradient [out, in] in kTile x kTile tiles, its positions in `chunks` runs, each with a partial sum.
struct WeightGrid {
  static constexpr int64_t kFewestChunks = 16, kMostChunks = 256, kWantedBlocks = 512;
  int64_t out_tiles, in_tiles, chunks, positions, workspace_bytes;

  WeightGrid(int64_t out, int64_t in, int64_t all_positions)
      : out_tiles(ceil_div(out, kTile)),
        in_tiles(ceil_div(in, kTile)),
        chunks(std::clamp(kWantedBlocks / std::max<int64_t>(1, out_tiles * in_tiles), kFewestChunks, kMostChunks)),
        positions(all_positions),
        workspace_bytes(chunks * out * in * static_cast<int64_t>(sizeof(float))) {}
  int64_t blocks() const { return out_tiles * in_tiles * chunks; }
};

// Both look at `op`: a forward call needs none.
inline int64_t premix_workspace_bytes(const PremixProblem& p) {
  if (p.op == Op::kPremixForward) return 0;
  return WeightGrid(p.heads * p.pseudo_heads, p.heads, (p.packed ? 1 : p.batch) * p.seqlen).workspace_bytes;
}
inline int64_t collapse_workspace_bytes(const CollapseProblem& p) {
  if (p.op == Op::kCollapseForward) return 0;
  return WeightGrid(p.heads, p.heads * p.pseudo_heads, p.batch * p.seqlen).workspace_bytes;
}

}  // namespace plait::cuda::naive
