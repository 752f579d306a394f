// The warps that feed the others: one finds row tiles, and one each copies queries, keys and values.
// Called by kernel.cuh.
#pragma once

#include <climits>

#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/prefill/epilogue.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillProducer {
  using Storage = PrefillStorage<T, kTile>;
  static constexpr int kKeys = kTile.tile_keys;

  const PrefillParams& params;
  Storage& storage;
  int lane;

  using WorkRing = RingPosition<kTile.work_slots>;
  static constexpr int kLead = 2;  // works taken that the others are not done with, where blocks share a counter

  // Finds all row tiles of this block, and then the end, ahead of the others; finishes those that see no key. (The
  // others could not: they look for the next row tile before they let go of the one that they are at.)
  __device__ __forceinline__ void find_rows() const {
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

  // Copies the queries (and O), the keys, or the values, of all row tiles, by one lane each: slots of keys are free
  // earlier than those of the values before them. In turn, keys and values are copied by the first lane, in the order
  // of the steps. Both lanes run one piece of code, and small tiles have one copy of it for keys and values: the
  // instruction cache holds about 32 KB, little more than what a row tile takes.
  __device__ __forceinline__ void copy_queries() const {
    if constexpr (kTile.stages_output()) {
      copy_queries_and_out();
    } else {
      WorkRing at;
      RingPosition<kTile.query_slots> slot;
      for (; wait_found(at); at.advance()) {
        for (int part = 0; part < kTile.query_parts(); ++part, slot.advance()) {
          ptx::mbarrier_wait(ptx::shared_address(&storage.queries_empty[slot.slot]), slot.parity ^ 1);
          copy_queries(storage.work[at.slot], part * kTile.query_rows, storage.q[slot.slot],
                       storage.queries_full[at.slot][part]);
        }
        ptx::mbarrier_arrive(ptx::shared_address(&storage.works.empty[at.slot]));
      }
    }
  }
  __device__ __forceinline__ void copy_keys_and_values(bool first_lane) const {
    WorkRing at;
    RingPosition<kTile.stages> slot;
    const bool keys = first_lane, values = first_lane == params.in_turn;
    for (; wait_found(at); at.advance()) {
      if (keys || values) copy_key_tiles(storage.work[at.slot], keys, values, slot);
      ptx::mbarrier_arrive(ptx::shared_address(&storage.works.empty[at.slot]));
    }
  }

 private:
  using KeyTile = typename Storage::KeyTile;

  // Slots of queries are full of O when they are let go of.
  __device__ __forceinline__ void copy_queries_and_out() const {
    WorkRing at, done;
    RingPosition<kTile.query_slots> slot, done_slot;
    int filled = 0;
    for (;;) {
      if (filled == kTile.query_slots) {
        end_queries(done, done_slot);
        --filled;
      }
      if (!wait_found(at)) break;
      copy_queries(storage.work[at.slot], 0, storage.q[slot.slot], storage.queries_full[at.slot][0]);
      at.advance();
      slot.advance();
      ++filled;
    }
    for (; filled > 0; --filled) end_queries(done, done_slot);
  }

  // Waits until a slot of queries is free, or full of O, which is copied.
  __device__ __forceinline__ void end_queries(WorkRing& at, RingPosition<kTile.query_slots>& slot) const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.queries_empty[slot.slot]), slot.parity);
    const PrefillWork& work = storage.work[at.slot];
    const bool copies = params.copies_out && work.last;
    if (copies) copy_out(work, slot.slot);
    ptx::mbarrier_arrive(ptx::shared_address(&storage.works.empty[at.slot]));
    if (copies) ptx::tma_stores_read();
    at.advance();
    slot.advance();
  }

  // False: there are no more row tiles.
  __device__ __forceinline__ bool wait_found(const WorkRing& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.found[at.slot]), at.parity);
    return storage.work[at.slot].tile >= 0;
  }

  template <int kSlots>
  static __device__ __forceinline__ void wait_empty(Ring<kSlots>& ring, const RingPosition<kSlots>& at) {
    ptx::mbarrier_wait(ptx::shared_address(&ring.empty[at.slot]), at.parity ^ 1);
  }

  // The number of the block's next row tile.
  __device__ __forceinline__ unsigned next(unsigned round) const {
    if (params.issued != nullptr) {
      unsigned index = 0;
      if (lane == 0) index = atomicAdd(params.issued, 1u);
      return __shfl_sync(kAllLanes, index, 0);
    }
    // Every other round backwards: over two rounds all blocks get the same of a list that runs from long to short.
    const unsigned in_round = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return round * gridDim.x + in_round;
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
    const PrefillOrder& order = params.order;
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
        index = (index - head * order.tiles) * ranges.heads + head;
      }
      mma::PrefillWork found = mma::find_work(params.problem, params.tensors, order, index, kTile.rows());
      if (found.tile < 0) return false;
      if (params.turns && (order.last_section - order.by_section_blocks.divide(index)) % 2 != 0) {
        found.tile = order.tiles - 1 - found.tile;
      }
      if (lane == 0) work = {found, pass, pass + 1 == params.problem.joint_passes(), work.range, 0, 0.0f, 0, 0};
    }
    __syncwarp();
    const NarrowRowMask mask =
        NarrowRowMask::of(params.problem, ranges.position(static_cast<int>(work.sequence.q_len)), work.sequence.kv_len);
    const int row_begin = work.tile * kTile.rows(), rows = mask.row_count() * ranges.group;
    const int row_end = min(rows, row_begin + kTile.rows());
    if (lane == 0) {
      mma::find_keys(work, mask, ranges.position(row_begin), ranges.position(row_end - 1) + 1);
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
    if (lane < kTile.warps()) storage.ranges[at.slot][lane] = range(storage.bounds[at.slot], work, lane);
    return true;
  }

  // As mma::row_bounds(), in 32 bits.
  __device__ __forceinline__ int2 row_bounds(const NarrowRowMask& mask, const PrefillWork& work, int row,
                                             int row_end) const {
    const Interval seen = mask.row(params.ranges.position(min(row, row_end - 1)));
    const int begin = static_cast<int>(work.key_begin);
    const int lo = min(max(static_cast<int>(seen.lo) - begin, 0), work.key_count);
    return {lo, min(max(static_cast<int>(seen.hi) - begin, lo), work.key_count)};
  }

  // Keys of a warp. Bounds never decrease from row to row. A warpgroup whose rows see none, or that has none, takes one
  // tile, of which it sees none.
  __device__ __forceinline__ KeyRange range(const int2* bounds, const PrefillWork& work, int warp) const {
    constexpr int kRows = catalog::Sm90PrefillTile::kWarpgroupRows, kWarpRows = kRows / kTile.kWarpgroupWarps;
    const int2 *own = bounds + warp * kWarpRows, *rows = bounds + warp / kTile.kWarpgroupWarps * kRows;
    const bool none = rows - bounds >= work.rows;
    const int first = none ? 0 : (max(rows[kRows - 1].y, 1) - 1) / kKeys;
    return {first * kKeys, min(rows[0].x / kKeys, first) * kKeys,
            params.score.transform ? INT_MAX : own[kWarpRows - 1].x, own[0].y};
  }

  // From `row` of the row tile on. A warpgroup without rows multiplies whatever lies there.
  __device__ __forceinline__ void copy_queries(const PrefillWork& work, int row, char* to, uint64_t& full) const {
    const int per = static_cast<int>(params.problem.rows_per_position());
    const int begin = work.tile * kTile.rows() + row, rows = min(work.rows - row, kTile.query_rows);
    if (rows <= 0) {
      ptx::mbarrier_arrive(ptx::shared_address(&full));
      return;
    }
    copy<typename Storage::QueryTile>(params.q, to, full, rows,
                                      static_cast<int>(work.sequence.q_begin) * per + begin + rows, work.head,
                                      static_cast<int>(work.sequence.batch), work.pass, [] {});
  }

  __device__ __forceinline__ void copy_out(const PrefillWork& work, int slot) const {
    using Tile = typename Storage::QueryTile;
    const RowTileIndex& index = params.copied_out.index;
    const int per = static_cast<int>(params.problem.rows_per_position());
    const int begin = work.tile * kTile.rows(), rows = min(work.rows, kTile.rows());
    const int end = static_cast<int>(work.sequence.q_begin) * per + begin + rows;
#pragma unroll 1
    for (int block = 0; block < index.column_blocks; ++block) {
      const auto to = index.coordinates(block * tile::kBlockColumns, rows, end, work.head,
                                        static_cast<int>(work.sequence.batch), 0);
      ptx::tma_store_5d(params.copied_out.map, ptx::shared_address(storage.q[slot]) + block * Tile::kBlockBytes, to.at);
    }
  }

  // The last keys first: the tiles that a causal mask cuts come before the long run of whole ones.
  __device__ __forceinline__ void copy_key_tiles(const PrefillWork& work, bool keys, bool values,
                                                 RingPosition<kTile.stages>& at) const {
    const int per = static_cast<int>(params.problem.rows_per_position());
    const int begin = static_cast<int>(work.sequence.kv_begin) * per + static_cast<int>(work.key_begin);
    const int head = work.head_kv, batch = static_cast<int>(work.sequence.kv_batch), pass = work.pass;
    int left = work.key_count;
    while (left > 0) {
      const int rows = (left - 1) % kKeys + 1, end = begin + left;
      left -= rows;
      if constexpr (kTile.tile_keys <= catalog::Sm90PrefillTile::kWarpgroupRows) {
#pragma unroll 1
        for (int of = keys ? 0 : 1; of <= (values ? 1 : 0); ++of) {
          auto& ring = of == 0 ? storage.keys : storage.values;
          copy<KeyTile>(of == 0 ? params.k : params.v, of == 0 ? storage.k[at.slot] : storage.v[at.slot],
                        ring.full[at.slot], rows, end, head, batch, pass, [&] { wait_empty(ring, at); });
        }
      } else {
        if (keys) {
          copy<KeyTile>(params.k, storage.k[at.slot], storage.keys.full[at.slot], rows, end, head, batch, pass,
                        [&] { wait_empty(storage.keys, at); });
        }
        if (values) {
          copy<KeyTile>(params.v, storage.v[at.slot], storage.values.full[at.slot], rows, end, head, batch, pass,
                        [&] { wait_empty(storage.values, at); });
        }
      }
      at.advance();
    }
  }

  // `rows` rows that end before row `end`, behind wait(); see RowTileIndex.
  template <class Tile, class Wait>
  __device__ __forceinline__ void copy(const RowTileMap& map, char* to, uint64_t& full, int rows, int end, int head,
                                       int batch, int pass, const Wait& wait) const {
    uint32_t barrier = ptx::shared_address(&full);
    int bytes = map.index.column_blocks * Tile::kBlockBytes;
    RowTileIndex::Coordinates from = map.index.coordinates(0, rows, end, head, batch, pass);
    if constexpr (Tile::kBlocks == 1) {  // ahead of the wait; for more copies than one it costs more than it saves
      asm volatile("" : "+r"(barrier), "+r"(bytes), "+r"(from.at[1]), "+r"(from.at[2]), "+r"(from.at[4]));
    }
    wait();
    ptx::mbarrier_arrive_expect(barrier, bytes);
#pragma unroll 1
    for (int block = 0; block < bytes; block += Tile::kBlockBytes, from.at[0] += tile::kBlockColumns) {
      ptx::tma_load_5d(ptx::shared_address(to) + block, map.map, barrier, from.at);
    }
  }
};

}  // namespace plait::cuda::sm90
