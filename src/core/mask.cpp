// The parts of the row mask that search or count.
// Called by the backward of every tiled backend (rows_seeing) and by flop_match and the tests (visited_tiles).
#include "core/mask.hpp"

namespace plait {

Interval RowMask::rows_seeing(int64_t key_begin, int64_t key_end) const {
  // row(i).lo and row(i).hi never decrease with i, so both ends are found by bisection.
  int64_t first = 0, count = row_count();
  while (count > 0) {
    const int64_t half = count / 2;
    if (row(first + half).hi <= key_begin) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  int64_t end = first;
  count = row_count() - first;
  while (count > 0) {
    const int64_t half = count / 2;
    if (row(end + half).lo < key_end) {
      end += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return key_end <= key_begin ? Interval{} : Interval{first, end};
}

int64_t visited_tiles(const RowMask& mask, int64_t tile_m, int64_t tile_n) {
  int64_t visits = 0;
  for (int64_t row = 0; row < mask.row_count(); row += tile_m) {
    const Interval keys = mask.rows(row, std::min(row + tile_m, mask.row_count()));
    if (!keys.empty()) visits += (keys.hi + tile_n - 1) / tile_n - keys.lo / tile_n;
  }
  return visits;
}

}  // namespace plait
