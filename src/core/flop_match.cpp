// The window that makes IHA visit as many key tiles as plain causal attention.
// Called by user code, the CLI's `window` and the Python package.
#include <fmt/format.h>

#include "core/mask.hpp"
#include "core/rounding.hpp"
#include "plait/iha.hpp"

namespace plait {
namespace {

int64_t causal_window_visits(int64_t rows, int64_t left, int64_t tile) {
  return visited_tiles(RowMask(rows, rows, /*causal=*/true, left, /*right=*/-1), tile, tile);
}

void require_positive(const char* argument, int64_t value) {
  if (value < 1) throw Error(ErrorCode::kInvalidArgument, argument, fmt::format("got {}, expected at least 1", value));
}

}  // namespace

FlopMatch flop_matched_window(int64_t seqlen, int64_t pseudo_heads, HeadMode mode, int64_t tile) {
  // Bounds that keep every product below in 64 bits and the tile count loop short.
  constexpr int64_t kMaxSeqlen = int64_t{1} << 32, kMaxTiles = int64_t{1} << 24;
  require_positive("N", seqlen);
  require_positive("P", pseudo_heads);
  require_positive("tile", tile);
  if (mode == HeadMode::kPlain) {
    throw Error(ErrorCode::kInvalidArgument, "mode", "got 'plain', expected 'joint' or 'interleaved'");
  }
  if (pseudo_heads > seqlen / 2) {
    if (pseudo_heads > 1) {
      throw Error(ErrorCode::kInvalidArgument, "P",
                  fmt::format("got {} with N = {}, expected 2P <= N; use a longer sequence or fewer pseudo-heads",
                              pseudo_heads, seqlen));
    }
  }
  if (seqlen > kMaxSeqlen || tile > kMaxSeqlen || pseudo_heads > kMaxTiles || seqlen / tile > kMaxTiles ||
      (seqlen / tile + 1) * pseudo_heads > kMaxTiles) {
    throw Error(ErrorCode::kInvalidArgument, "N",
                fmt::format("got {} with P = {} and tile = {}, expected at most 2^32 positions and 2^24 query tiles",
                            seqlen, pseudo_heads, tile));
  }
  const int64_t rounded = round_up(seqlen, tile);
  FlopMatch match;
  match.causal_visits = causal_window_visits(rounded, -1, tile);
  if (pseudo_heads == 1) {
    match.visits = match.causal_visits;
    return match;
  }
  const bool joint = mode == HeadMode::kJoint;
  const int64_t rows = joint ? rounded : rounded * pseudo_heads, passes = joint ? pseudo_heads : 1;
  const auto visits = [&](int64_t left) { return passes * causal_window_visits(rows, left, tile); };
  match.formula_left = rounded / (2 * pseudo_heads) - 1;
  match.left = match.formula_left;
  match.visits = visits(match.left);
  if (match.visits < match.causal_visits) {
    // visits() never decreases with the window: bisect the smallest tile*t + 1 that reaches the causal count.
    int64_t below = 0, reaches = rows / tile;
    while (reaches - below > 1) {
      const int64_t middle = below + (reaches - below) / 2;
      (visits(tile * middle + 1) >= match.causal_visits ? reaches : below) = middle;
    }
    if (visits(tile * below + 1) >= match.causal_visits) reaches = below;
    match.left = tile * reaches + 1;
    match.visits = visits(match.left);
  }
  match.visit_ratio = static_cast<double>(match.visits) / static_cast<double>(match.causal_visits);
  return match;
}

}  // namespace plait
