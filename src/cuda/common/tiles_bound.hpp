// How many tiles a problem has at most. Plain C++.
// Called by the launch functions of naive, mma and sm90, and by prefill_order.hpp.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "core/rounding.hpp"

namespace plait::cuda {

// How many blocks a launch needs so that find_tile() reaches every tile; the host does not read packed lengths.
inline int64_t tiles_bound(const AttentionProblem& p, int64_t tile_rows, bool keys) {
  const int64_t rows = (keys ? p.seqlen_kv : p.seqlen_q) * p.rows_per_position();
  if (!p.packed) return p.batch * ceil_div(rows, tile_rows);
  return rows == 0 ? 0 : rows / tile_rows + p.batch + 1;
}

}  // namespace plait::cuda
