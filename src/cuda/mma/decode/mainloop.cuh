// The key loop of the decode kernel: each warp takes its own steps of keys through its own ring, without a barrier.
// Called by kernel.cuh and cluster.cuh.
#pragma once

#include "cuda/mma/decode/storage.cuh"
#include "cuda/mma/decode/stream.cuh"
#include "cuda/tile/products.cuh"

namespace plait::cuda::mma {

template <class T, catalog::DecodeTile kTile, DecodeAccess kAccess = DecodeAccess::kAny>
struct DecodeMainloop {
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.step_keys, kSlots = kTile.slots;
  static constexpr int kBlocks = kTile.row_blocks;
  static constexpr int kRows = 2 * kBlocks;     // per thread
  static constexpr int kDepth = kHeadDim / 16;  // of 16 columns of q, k and v
  static constexpr int kKeyBlocks = kKeys / 16;
  static constexpr bool kQueryInRegisters = kTile.query_in_registers();
  static constexpr uint32_t kSlotBytes = kTile.slot_elems() * sizeof(T);

  using Storage = DecodeStorage<T, kTile>;
  using Stream = KeyStream<T, kTile, kAccess>;
  using Fragment = tile::Fragments<kHeadDim>;
  using Scores = float[kBlocks][2 * kKeyBlocks][4];
  using Output = float[kBlocks][2 * kDepth][4];
  using Queries = uint32_t[kQueryInRegisters ? kDepth : 1][kBlocks][4];

  const DecodeParams& params;
  Storage& storage;
  int warp, lane;

  // All keys of a segment, all passes, to `out` and `rows`. All threads call `note` while the first keys are on their
  // way, before a barrier of the block. Called by the whole block, which no longer uses `storage`.
  template <class Note>
  __device__ __forceinline__ void run(const DecodeSegment& segment, const Note& note, Output& out,
                                      SoftmaxRows<kRows>& rows) const {
    const int passes = kAccess == DecodeAccess::kRows ? 1 : params.passes;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      if (pass > 0) __syncthreads();  // all warps have read the queries before
      run_pass(segment, pass, note, out, rows);
    }
  }

 private:
  static_assert(kTile.rows() <= kTile.threads());

  // What is known of each row of the segment: the keys it sees, and where its result goes.
  __device__ __forceinline__ void find_rows(const DecodeSegment& segment) const {
    if (threadIdx.x >= kTile.rows()) return;
    const int row = min(static_cast<int>(threadIdx.x), segment.rows - 1);  // past the last: like it
    storage.places[threadIdx.x] = row_place(params, segment, row);
    const Interval seen = params.mask(segment.sequence_keys).row(params.by_group.divide(segment.row_begin + row));
    const int lo = max(static_cast<int>(seen.lo), segment.key_begin);
    storage.bounds[threadIdx.x] = {lo, max(lo, min(static_cast<int>(seen.hi), segment.key_end))};
  }

  __device__ __forceinline__ void load_queries(const DecodeSegment& segment, int pass) const {
    constexpr int kChunks = kHeadDim / tile::kChunkElems;
    const uint32_t target = ptx::shared_address(storage.q);
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile.rows() * kChunks; i += kTile.threads()) {
      const int r = i / kChunks, column = i % kChunks * tile::kChunkElems;
      const uint32_t to = target + tile::Swizzle<kHeadDim>::offset(r, i % kChunks) * sizeof(T);
      if (r >= segment.rows) {
        ptx::store_shared_16(to, {});
        continue;
      }
      const T* from = static_cast<const T*>(params.q.data) + row_offset(params, params.q, segment, r, pass);
      if (kAccess == DecodeAccess::kAny && params.q.path == LoadPath::kAny) {
        store_chunk(to, from, column, params.q.columns(), true);
      } else {
        ptx::cp_async_16(to, from + column, column < params.q.dim);
      }
    }
  }

  // The items of a ring are keys, values, keys, ... of the warp's steps. Before item i is used, item i + kSlots - 1 is
  // sent for, into the place of item i - 1; the loop begins early to fill the ring. The queries come with the first
  // keys, behind them where the ring has a place free.
  template <class Note>
  __device__ __forceinline__ void run_pass(const DecodeSegment& segment, int pass, const Note& note, Output& out,
                                           SoftmaxRows<kRows>& rows) const {
    constexpr int kEarlySteps = kSlots / 2;
    constexpr bool kEven = kSlots % 2 == 0;
    const uint32_t ring = ptx::shared_address(storage.ring[warp]);
    const uint32_t query_lanes = ptx::shared_address(storage.q) + Fragment::lane_bytes(lane);
    const uint32_t key_lanes = ring + Fragment::lane_bytes_b(lane), value_lanes = ring + Fragment::lane_bytes(lane);
    Stream stream(params, segment, pass, storage.masks[warp], segment.key_begin + warp * kKeys, kTile.warps * kKeys);
    Queries queries;
    // Bytes from the ring's first: slot 0 is the first one filled, and in use from step 0 on.
    uint32_t slot = kEven ? 0 : kSlotBytes, free_slot = kEven ? (kSlots - 1) * kSlotBytes : 0;
    int key = segment.key_begin + warp * kKeys;
#pragma unroll 1
    for (int step = -kEarlySteps;; ++step) {
      if (step == 0) {
        if (pass == 0) {
          clear(out, rows);
          find_rows(segment);
          note();
        }
        ptx::cp_async_wait<kSlots - 2>();
        __syncthreads();  // queries, bounds and what was noted, by all threads for all
        if constexpr (kQueryInRegisters) tile::read_queries<kHeadDim>(queries, query_lanes);
      }
      if (step >= 0) {
        if (key >= segment.key_end) break;
        ptx::cp_async_wait<kSlots - 2>();
        __syncwarp();
      }
      if (!kEven) stream.load_keys(ring + free_slot);
      if (step == -kEarlySteps) {
        load_queries(segment, pass);
      } else if (kEven) {
        stream.load_values(ring + free_slot);
      }
      ptx::cp_async_commit();
      Scores scores{};
      if (step >= 0) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          tile::multiply_keys<T, kHeadDim, kQueryInRegisters>(scores, queries, key_lanes + slot, query_lanes, d);
        }
        attend(scores, key, step, out, rows);
      }
      advance(slot, free_slot);

      if (step >= 0) {
        ptx::cp_async_wait<kSlots - 2>();
        __syncwarp();
      }
      kEven ? stream.load_keys(ring + free_slot) : stream.load_values(ring + free_slot);
      ptx::cp_async_commit();
      if (step >= 0) {
#pragma unroll
        for (int n = 0; n < kKeyBlocks; ++n) {
          tile::multiply_values<T, kHeadDim>(out, scores, value_lanes + slot, n);
        }
        key += kTile.warps * kKeys;
      }
      advance(slot, free_slot);
    }
    ptx::cp_async_wait<0>();
  }

  __device__ __forceinline__ static void clear(Output& out, SoftmaxRows<kRows>& rows) {
    rows = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int n = 0; n < 2 * kDepth; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[block][n][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ static void advance(uint32_t& slot, uint32_t& free_slot) {
    free_slot = slot;
    slot = slot == (kSlots - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
  }

  // Products to probabilities.
  __device__ __forceinline__ void attend(Scores& scores, int key, int step, Output& out,
                                         SoftmaxRows<kRows>& rows) const {
    if (params.score.transform) transform_scores(scores, params.score);
    const int2 first = storage.bounds[0], last = storage.bounds[kTile.rows() - 1];
    if (key < last.x || key + kKeys > first.y) apply_bounds(scores, storage.bounds, key, lane);
    if (kAccess == DecodeAccess::kAny && params.table != nullptr) {
      const uint32_t mask = storage.masks[warp][step % kTile.steps_under_way()];
      if (mask != Stream::kAllKeys) apply_mask(scores, mask);
    }
    float highest[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      highest[i] = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < 2 * kKeyBlocks; ++n) {
        const float* two = scores[i / 2][n] + i % 2 * 2;
        highest[i] = fmaxf(highest[i], fmaxf(two[0], two[1]));
      }
    }
    rows.raise(highest, params.score.to_log2, out);
    rows.exponentiate(scores, params.score.to_log2);
  }

  __device__ __forceinline__ void apply_mask(Scores& scores, uint32_t mask) const {
#pragma unroll
    for (int n = 0; n < 2 * kKeyBlocks; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool seen = mask >> (8 * n + lane % 4 * 2 + e % 2) & 1;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          if (!seen) scores[block][n][e] = -CUDART_INF_F;
        }
      }
    }
  }
};

}  // namespace plait::cuda::mma
