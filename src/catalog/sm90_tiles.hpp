// Tiles of the wgmma forward attention kernel per head-dim bucket, as plain data.
// Called by the kernels of cuda/sm90/prefill (as template arguments), the planner and the tests.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>

namespace plait::catalog {

// One instantiation of the kernel: `warpgroups` warpgroups of 64 query rows each take tile_keys keys at a time through
// both products; three warps of one more copy.
struct Sm90PrefillTile {
  int head_dim;  // bucket: covers max(head_dim, head_dim_v) by zero fill
  int warpgroups, tile_keys;
  int query_rows;           // of a slot of queries: those of the row tile, or of a warpgroup
  int query_slots, stages;  // of queries, and of keys and of values
  int work_slots;           // of what is known of row tiles
  int consumer_registers, producer_registers;
  int early_eighths;  // of the exponentials that come before the wait for O; the others come behind it
  int in_turn_above;  // keys of a sequence: if more, one lane copies keys and values in turn; else one each
  bool by_sums;       // references are raised by sums of probabilities; keys are kept until then
  bool ragged;        // for windows and packed sequences
  int step_clocks;    // of a tile of keys, measured with one row tile on each multiprocessor; for the planner

  static constexpr int kWarpgroupRows = 64, kWarpgroupThreads = 128, kWarpgroupWarps = 4;
  static constexpr int kWorkBytes = 136, kWarpKeysBytes = 16;
  // Of a thread when the block starts; consumers get what the producers give back, no more.
  constexpr int start_registers() const { return 65536 / threads() / 8 * 8; }
  constexpr int rows() const { return warpgroups * kWarpgroupRows; }
  constexpr int threads() const { return (warpgroups + 1) * kWarpgroupThreads; }
  constexpr int warps() const { return warpgroups * kWarpgroupWarps; }
  constexpr int query_parts() const { return rows() / query_rows; }  // slots that a row tile takes
  // With slots for two row tiles, O goes where the queries were. Else these make room for the next ones at once.
  constexpr bool stages_output() const { return query_slots >= 2 * query_parts(); }
  // Tiles of 16-bit elements; [lo, hi) of each row, keys of each warp, what is known of a row tile; barriers; in whole
  // swizzle patterns.
  constexpr int64_t smem_bytes() const {
    constexpr int64_t kBarrierBytes = 320, kAlignBytes = 1024;
    const int64_t bytes = int64_t{2} * head_dim * (query_slots * query_rows + 2 * stages * tile_keys) +
                          work_slots * (8 * rows() + kWarpKeysBytes * warps() + kWorkBytes) + kBarrierBytes;
    return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  }
  bool operator==(const Sm90PrefillTile&) const = default;
};

// In order of the buckets: bucket, warpgroups, keys, rows of queries, slots of queries, of keys and values, of works,
// registers of consumers and producers, eighths, in_turn_above, by_sums, ragged, step_clocks.
inline constexpr std::array<Sm90PrefillTile, 5> kSm90PrefillTiles{{
    {64, 4, 64, 256, 2, 4, 4, 112, 32, 5, INT_MAX, true, false, 1460},
    {128, 2, 128, 128, 2, 2, 4, 232, 40, 2, 1024, false, false, 2300},
    {128, 3, 64, 192, 2, 3, 4, 152, 56, 2, 1024, true, true, 1670},
    {192, 2, 64, 64, 3, 3, 4, 232, 40, 6, 1024, false, false, 1780},
    {256, 2, 64, 64, 3, 2, 2, 232, 40, 5, 4096, false, false, 2300},
}};

// Which of them: of the bucket that holds head_dim, at most the last; the ragged one, if it has one and that is asked
// for.
constexpr size_t sm90_prefill_tile_index(int64_t head_dim, bool ragged) {
  size_t index = 0;
  while (kSm90PrefillTiles[index].head_dim < head_dim) ++index;
  const size_t next = index + 1;
  const bool has_ragged = next < kSm90PrefillTiles.size() && kSm90PrefillTiles[next].ragged;
  return ragged && has_ragged ? next : index;
}

}  // namespace plait::catalog
