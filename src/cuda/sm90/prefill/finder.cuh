// The warp that finds row tiles, and what the others need to know of each.
// Called by kernel.cuh.
#pragma once

#include <climits>

#include "cuda/sm90/prefill/epilogue.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillFinder {
  using WorkRing = RingPosition<kTile.work_slots>;
  static constexpr int kKeys = kTile.tile_keys;
  static constexpr int kLead = 2;  // works taken that the others are not done with, where blocks share a counter

  const PrefillParams& params;
  PrefillStorage<T, kTile>& storage;
  int lane;

  // Finds all row tiles of this block, and then the end, ahead of the others; finishes those that see no key. (The
  // others could not: they look for the next row tile before they let go of the one that they are at.)
  __device__ __forceinline__ void run() const {
    WorkRing at;
    const int passes = static_cast<int>(params.problem.joint_passes());
    for (unsigned round = 0;; ++round) {
      wait_empty(storage.works, at);
      if (params.issued != nullptr) {  // what is taken early another block cannot take
        const WorkRing before = at.before(kLead);
        ptx::mbarrier_wait(ptx::shared_address(&storage.works.empty[before.slot]), before.parity);
      }
      const unsigned index = next(round);
      if (index >= params.works) break;
      for (int pass = 0; pass < passes && find(index, pass, at); ++pass) {
        const PrefillWork& work = storage.work[at.slot];
        if (work.key_count == 0) {
          store_nothing(params, work, work.tile * kTile.rows(), min(work.rows, kTile.rows()), lane);
          __syncwarp();
          break;
        }
        publish(at);
        at.advance();
      }
    }
    if (lane == 0) {
      storage.work[at.slot].tile = -1;
      publish_copies(at);
    }
    publish(at);
  }

 private:
  // The number of the block's next row tile.
  __device__ __forceinline__ unsigned next(unsigned round) const {
    if (params.issued != nullptr) {
      unsigned index = 0;
      if (lane == 0) index = atomicAdd(params.issued, 1u);
      return __shfl_sync(kAllLanes, index, 0);
    }
    return row_tile_of_round(round, blockIdx.x, gridDim.x);
  }

  // What each lane wrote becomes visible to who waits for the slot.
  __device__ __forceinline__ void publish(const WorkRing& at) const {
    ptx::mbarrier_arrive(ptx::shared_address(&storage.works.full[at.slot]));
  }
  // The same for what copies need, by the lane that wrote it.
  __device__ __forceinline__ void publish_copies(const WorkRing& at) const {
    ptx::mbarrier_arrive(ptx::shared_address(&storage.found[at.slot]));
  }

  // Writes down a pass of the index-th row tile, its keys and the bounds of its rows. False: there is no such tile. All
  // of it goes through shared memory: the warp has few registers.
  __device__ __forceinline__ bool find(unsigned index, int pass, const WorkRing& at) const {
    const PrefillOrder& sections = params.order.sections;
    const RangeParams& ranges = params.ranges;
    const int per = static_cast<int>(params.problem.rows_per_position());
    PrefillWork& work = storage.work[at.slot];
    wait_empty(storage.works, at);
    {
      const unsigned part = ranges.by_works.divide(index);
      index -= part * ranges.works;
      if (lane == 0) work.range = static_cast<int>(part);  // registers are short
      if (ranges.group > 1) {                              // row tiles of the same keys go to neighbouring blocks
        const unsigned head = ranges.by_tiles.divide(index);
        index = (index - head * sections.tiles) * ranges.heads + head;
      }
      const cuda::PrefillWork found =
          find_work(params.problem, params.tensors, sections, params.order.place(index), kTile.rows());
      if (found.tile < 0) return false;
      if (lane == 0) work = {found, pass, pass + 1 == params.problem.joint_passes(), work.range, 0, 0.0f, 0, 0};
    }
    __syncwarp();
    const NarrowRowMask mask =
        NarrowRowMask::of(params.problem, ranges.position(static_cast<int>(work.sequence.q_len)), work.sequence.kv_len);
    const int row_begin = work.tile * kTile.rows(), rows = mask.row_count() * ranges.group;
    const int row_end = min(rows, row_begin + kTile.rows());
    if (lane == 0) {
      find_keys(work, mask, ranges.position(row_begin), ranges.position(row_end - 1) + 1);
      if (per > 1) {  // whole tokens, as the copy engine may need; bounds say what is seen
        const int begin = static_cast<int>(work.key_begin), before = begin % per, count = work.key_count + before;
        work.key_begin = begin - before;
        if (work.key_count > 0) work.key_count = (count + per - 1) / per * per;
      }
      if (ranges.ranges.count > 1) ranges.cut(work.range, kKeys, work.key_begin, work.key_count);
      work.rows = rows - row_begin;
      if (work.key_count > 0) publish_copies(at);
    }
    __syncwarp();
    if (lane == 0) {
      work.out = out_offset(params.tensors.out, work) + work.range * ranges.out_stride;
    } else if (lane == 1) {
      work.lse = lse_offset(params.problem, params.tensors.lse, work.sequence, work.head, row_begin) +
                 work.range * ranges.lse_stride;
    } else if (lane == 2) {
      work.sink = sink_of(params, work);
    }
    __syncwarp();
    for (int row = lane; row < kTile.rows(); row += 32) {
      storage.bounds[at.slot][row] = row_bounds(mask, work, row_begin + row, row_end);
    }
    __syncwarp();
    if (lane < kTile.warps()) storage.warp_keys[at.slot][lane] = warp_keys(storage.bounds[at.slot], work, lane);
    return true;
  }

  // As cuda::row_bounds(), in 32 bits.
  __device__ __forceinline__ int2 row_bounds(const NarrowRowMask& mask, const PrefillWork& work, int row,
                                             int row_end) const {
    const Interval seen = mask.row(params.ranges.position(min(row, row_end - 1)));
    const int begin = static_cast<int>(work.key_begin);
    const int lo = min(max(static_cast<int>(seen.lo) - begin, 0), work.key_count);
    return {lo, min(max(static_cast<int>(seen.hi) - begin, lo), work.key_count)};
  }

  // Keys of a warp. Bounds never decrease from row to row. A warpgroup whose rows see none, or that has none, takes one
  // tile, of which it sees none.
  __device__ __forceinline__ WarpKeys warp_keys(const int2* bounds, const PrefillWork& work, int warp) const {
    constexpr int kRows = catalog::Sm90PrefillTile::kWarpgroupRows, kWarpRows = kRows / kTile.kWarpgroupWarps;
    const int2 *own = bounds + warp * kWarpRows, *rows = bounds + warp / kTile.kWarpgroupWarps * kRows;
    const bool none = rows - bounds >= work.rows;
    const int first = none ? 0 : (max(rows[kRows - 1].y, 1) - 1) / kKeys;
    return {first * kKeys, min(rows[0].x / kKeys, first) * kKeys,
            params.score.transform ? INT_MAX : own[kWarpRows - 1].x, own[0].y};
  }
};

}  // namespace plait::cuda::sm90
