// Which tile a problem takes. Plain C++.
// Called by the planner, layouts.hpp and launch.cuh.
#pragma once

#include <algorithm>
#include <climits>

#include "catalog/sm90_tiles.hpp"
#include "core/problem.hpp"

namespace plait::cuda::sm90 {

// Keys of a sequence, in the mean of a packed problem.
inline int64_t sequence_keys(const AttentionProblem& p) {
  const int64_t sequences = p.packed ? std::max(p.batch, int64_t{1}) : 1;
  return p.seqlen_kv * p.rows_per_position() / sequences;
}

// Keys that a row sees in the mean of a problem with as many rows as keys.
inline int64_t row_keys(const AttentionProblem& p) {
  const int64_t keys = p.causal ? sequence_keys(p) / 2 : sequence_keys(p);
  if (p.window_left < 0) return keys;
  const bool ends = p.causal || p.window_right >= 0;
  return ends ? std::min(keys, p.window_left + 1 + (p.causal ? 0 : p.window_right)) : keys;
}

inline size_t prefill_tile_index(const AttentionProblem& p) {
  const int64_t keys = std::min<int64_t>(row_keys(p), INT_MAX);  // the planner refuses more later
  return catalog::sm90_prefill_tile_index(std::max(p.head_dim, p.head_dim_v), keys);
}

inline const catalog::Sm90PrefillTile& prefill_tile(const AttentionProblem& p) {
  return catalog::kSm90PrefillTiles[prefill_tile_index(p)];
}

}  // namespace plait::cuda::sm90
