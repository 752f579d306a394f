// Who copies queries and O, keys, and values: a lane of a warp each.
// Called by kernel.cuh.
#pragma once

#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/prefill/storage.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillCopier {
  using Storage = PrefillStorage<T, kTile>;
  using WorkRing = RingPosition<kTile.work_slots>;
  static constexpr int kKeys = kTile.tile_keys;

  const PrefillParams& params;
  Storage& storage;

  // Copies the queries (and O), the keys, or the values, of all row tiles, by one lane each: slots of keys are free
  // earlier than those of the values before them. In turn, keys and values are copied by the first lane, in the order
  // of the steps. Both lanes run one piece of code, with one copy of it for keys and values: the instruction cache
  // holds about 32 KB, little more than what a row tile takes. (Bucket 128 has two: with one it loses 1 to 2 % in long
  // sequences.)
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
      if constexpr (kTile.head_dim != 128) {
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
