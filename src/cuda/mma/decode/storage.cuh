// The shared memory of a decode block.
// Used by mainloop.cuh, combine.cuh and kernel.cuh.
#pragma once

#include "catalog/mma_decode_tiles.hpp"
#include "cuda/mma/decode/schedule.cuh"

namespace plait::cuda::mma {

template <class T, catalog::DecodeTile kTile>
struct alignas(128) DecodeStorage {
  static constexpr int kBlockRows = catalog::DecodeTile::kBlockRows;
  alignas(128) T q[kTile.rows() * kTile.head_dim];
  // Each warp's own; behind the key loop, its accumulators of one row block (stage()).
  alignas(128) T ring[kTile.warps][kTile.slots * kTile.slot_elems()];
  int2 bounds[kTile.rows()];              // keys [lo, hi) of each row in this segment
  RowPlace places[kTile.rows()];          // where each row's result goes
  float2 stats[kTile.warps][kBlockRows];  // reference and sum of each row of a row block
  uint32_t masks[kTile.warps][kTile.steps_under_way()];
  // Here, not in registers, which the key loop needs. The place and the shares are the last thread's own.
  DecodeSegment segment;
  DecodePart part;
  StepPlace place;
  Shares shares;
  int last;           // whether this block is the unit's last
  uint64_t received;  // an mbarrier: what the cluster sends (cluster.cuh)

  // fp32 rows at a pitch that gives eight rows of a fragment eight different groups of banks.
  static constexpr int kStagePitch = kTile.head_dim + 8;
  static_assert(sizeof(float) * kBlockRows * kStagePitch <= sizeof(T) * kTile.slots * kTile.slot_elems());
  __device__ __forceinline__ float* stage(int warp) { return reinterpret_cast<float*>(ring[warp]); }
};

}  // namespace plait::cuda::mma
