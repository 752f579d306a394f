// Counting the key tiles that a mask lets attention visit.
// Called by flop_match.cpp and the tests.
#include "core/mask.hpp"

namespace plait {

int64_t visited_tiles(const RowMask& mask, int64_t tile_m, int64_t tile_n) {
  int64_t visits = 0;
  for (int64_t row = 0; row < mask.row_count(); row += tile_m) {
    const Interval keys = mask.rows(row, std::min(row + tile_m, mask.row_count()));
    if (!keys.empty()) visits += (keys.hi + tile_n - 1) / tile_n - keys.lo / tile_n;
  }
  return visits;
}

}  // namespace plait
