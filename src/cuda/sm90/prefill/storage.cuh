// What a launch tells the prefill kernel, its shared memory, its barriers.
// Called by finder.cuh, copier.cuh and consumer.cuh.
#pragma once

#include "catalog/sm90_tiles.hpp"
#include "cuda/common/apply_mask.cuh"
#include "cuda/common/loader.cuh"
#include "cuda/common/schedule.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/prefill/key_ranges.hpp"
#include "cuda/sm90/prefill/order.hpp"
#include "cuda/sm90/tensor_map.hpp"
#include "cuda/tile/wgmma_tile.hpp"

namespace plait::cuda::sm90 {

// What goes through the ring of works: one pass over the keys of a row tile. Joint problems have several, of one
// softmax; all others have one.
struct PrefillWork : cuda::PrefillWork {
  int pass;
  bool last;         // pass
  int range;         // of its keys
  int rows;          // of the row tile that exist
  float sink;        // natural-log units; -inf without one
  int64_t out, lse;  // elements: row 0 of the sequence in O, and the row tile's first row in LSE
};

// The tiles of keys that some row of a warpgroup sees, of a row tile: from the one at `first` down to the one at `end`.
// No row of the warp masks keys of [whole_from, whole_to).
struct alignas(16) WarpKeys {
  int first, end, whole_from, whole_to;
};

struct PrefillParams {
  RowTileMap q, k, v, copied_out;  // the last one is not set if O is not copied
  AttentionProblem problem;
  AttentionTensors tensors;
  RowLayout out;
  bool copies_out;  // from where the queries were
  ScoreScale score;
  RowTileOrder order;
  RangeParams ranges;
  unsigned works;    // row tiles of all heads, of all ranges
  unsigned* issued;  // how many of them blocks have taken; null: they take them in a fixed order
  bool in_turn;      // keys and values are copied by one lane
};

// Full: one arrival, by who fills the slot, and the bytes that it copies. Empty: one arrival of each consumer warp.
// Works are written and read by whole warps, without the copy engine, once per row tile: there every lane of the finder
// and every consumer thread arrives for itself, so that the order shows without __syncwarp; and each of the copiers.
template <int kSlots>
struct Ring {
  uint64_t full[kSlots], empty[kSlots];
};

// Which slot of a ring comes next, and the parity of its phase.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int steps) {
    for (int step = 0; step < steps; ++step) advance();
  }
  // `steps` ago, up to kSlots. Ahead of the first position: the parity for which a wait returns at once.
  __device__ __forceinline__ RingPosition before(int steps) const {
    return slot >= steps ? RingPosition{slot - steps, parity} : RingPosition{slot + kSlots - steps, parity ^ 1};
  }
};

template <int kSlots>
__device__ __forceinline__ void wait_empty(Ring<kSlots>& ring, const RingPosition<kSlots>& at) {
  ptx::mbarrier_wait(ptx::shared_address(&ring.empty[at.slot]), at.parity ^ 1);
}

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillStorage {
  using QueryTile = tile::WgmmaTile<kTile.query_rows, kTile.head_dim>;
  using KeyTile = tile::WgmmaTile<kTile.tile_keys, kTile.head_dim>;
  static_assert(QueryTile::kBytes % tile::kSwizzleAlignBytes == 0 && KeyTile::kBytes % tile::kSwizzleAlignBytes == 0);

  alignas(tile::kSwizzleAlignBytes) char q[kTile.query_slots][QueryTile::kBytes];
  char k[kTile.stages][KeyTile::kBytes];
  char v[kTile.stages][KeyTile::kBytes];
  int2 bounds[kTile.work_slots][kTile.rows()];  // [lo, hi) of each row, counted from the work's key_begin
  WarpKeys warp_keys[kTile.work_slots][kTile.warps()];
  PrefillWork work[kTile.work_slots];  // tile < 0: there is no more
  static_assert(sizeof(PrefillWork) <= kTile.kWorkBytes && sizeof(WarpKeys) == kTile.kWarpKeysBytes);
  Ring<kTile.work_slots> works;      // bounds, warp_keys and work
  uint64_t found[kTile.work_slots];  // full, for those who copy: they do not wait for the rest
  // Queries: full by work, since warpgroups that share slots do not see all phases of a slot.
  uint64_t queries_full[kTile.work_slots][kTile.query_parts()], queries_empty[kTile.query_slots];
  Ring<kTile.stages> keys, values;
};

}  // namespace plait::cuda::sm90
