// Which tile a problem takes. Plain C++.
// Called by the planner, layouts.hpp and launch.cuh.
#pragma once

#include <algorithm>

#include "catalog/sm90_tiles.hpp"
#include "core/problem.hpp"

namespace plait::cuda::sm90 {

// Keys of a sequence, in the mean of a packed problem.
inline int64_t sequence_keys(const AttentionProblem& p) {
  const int64_t sequences = p.packed ? std::max(p.batch, int64_t{1}) : 1;
  return p.seqlen_kv * p.rows_per_position() / sequences;
}

// Whether a window may hide keys: callers give windows longer than the sequence, or with a causal mask a right side.
inline bool windowed(const AttentionProblem& p) {
  const int64_t per = p.rows_per_position();
  const bool diagonal = p.causal && p.mask != PseudoMask::kToken;
  return (p.window_left >= 0 && p.window_left < p.seqlen_kv * per - 1) || (p.window_right >= 0 && !diagonal);
}

// Windows end, and packed sequences begin, anywhere in a tile: smaller tiles of keys compute less in vain there.
inline size_t prefill_tile_index(const AttentionProblem& p) {
  return catalog::sm90_prefill_tile_index(std::max(p.head_dim, p.head_dim_v), p.packed || windowed(p));
}

inline const catalog::Sm90PrefillTile& prefill_tile(const AttentionProblem& p) {
  return catalog::kSm90PrefillTiles[prefill_tile_index(p)];
}

}  // namespace plait::cuda::sm90
