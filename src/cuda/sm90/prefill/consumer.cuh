// A warpgroup that multiplies: 64 query rows of a tile through all keys that they see.
// Called by kernel.cuh.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/prefill/epilogue.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillConsumer {
  using Storage = PrefillStorage<T, kTile>;
  using QueryTile = typename Storage::QueryTile;
  using KeyTile = typename Storage::KeyTile;
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.tile_keys;
  static constexpr int kOutColumns = kHeadDim < 128 ? kHeadDim : 128;  // of one wgmma
  static constexpr int kWarpRows = 16;

  using Scores = float[1][kKeys / 8][4];
  using Output = float[1][kHeadDim / 8][4];
  using Weights = uint32_t[kKeys / tile::kWgmmaDepth][4];  // probabilities as operands
  using Rows = SoftmaxRows<2>;
  // A row tile's next keys: from `first` on. No row of the warp masks keys of [whole_from, whole_to).
  struct KeyRange {
    int first, whole_from, whole_to;
  };
  using KeyRing = RingPosition<kTile.stages>;
  struct Position {
    RingPosition<kTile.kWorkSlots> work;
    RingPosition<kTile.query_slots> query;
    KeyRing key;  // of keys; values are as far, or one tile behind
  };

  const PrefillParams& params;
  Storage& storage;
  int warpgroup, warp, lane;  // warp: of the block's consumers

  // All row tiles that the producer finds. Scores of one tile of keys are computed while those of the tile before weigh
  // values, also from one row tile to the next.
  __device__ __forceinline__ void run() const {
    Position at;
    KeyRange keys;
    if (!find_rows(at, keys)) return;
    Output out;
    Scores scores;
    Weights weights;
    Rows rows;
    float factor[2];
    clear(out);
    wait_queries(at);
    wait_keys(at.key);
    multiply_keys(scores, at);
    ptx::wgmma_wait<0>();
    ptx::hold(scores[0]);
    release_keys(at, keys);
    exponentiate(scores, rows, factor, at, keys);
    pack_weights(weights, scores);
#pragma unroll 1
    for (;;) {
      const KeyRing values = at.key;
      at.key.advance();
      if (keys.first > 0) {
        keys.first -= kKeys;
        wait_keys(at.key);
        multiply_keys(scores, at);
        wait_values(values);
        multiply_values(out, weights, values);
        ptx::wgmma_wait<1>();
        ptx::hold(scores[0]);
      } else {
        const int work = at.work.slot;
        wait_values(values);
        multiply_values(out, weights, values);
        at.work.advance();
        at.query.advance();
        const bool more = find_rows(at, keys);
        if (more) {
          wait_queries(at);
          wait_keys(at.key);
        }
        multiply_keys(scores, at);  // without more, of whatever lies there
        ptx::wgmma_wait<1>();
        ptx::hold(out[0]);
        store_output<T, kHeadDim>(out[0], rows, params, storage.work[work], first_row(storage.work[work]), lane);
        release(storage.works.empty[work]);
        ptx::wgmma_wait<0>();
        ptx::hold(scores[0]);
        if (!more) return;
        clear(out);
        rows = Rows();
      }
      release_keys(at, keys);
      const bool raised = exponentiate(scores, rows, factor, at, keys);
      if (raised) {  // also keeps the compiler from moving exponentials behind the wait
        ptx::wgmma_wait<0>();
        ptx::hold(out[0]);
        Rows::rescale(out, factor);
      }
      ptx::wgmma_wait<0>();
      ptx::hold(out[0]);
      release(storage.values.empty[values.slot]);
      pack_weights(weights, scores);
    }
  }

 private:
  // The warp has read a slot.
  __device__ __forceinline__ void release(uint64_t& empty) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  // The scores of a tile of keys are there: its slot is free, and that of the queries behind the last one.
  __device__ __forceinline__ void release_keys(const Position& at, const KeyRange& keys) const {
    __syncwarp();
    if (lane != 0) return;
    ptx::mbarrier_arrive(ptx::shared_address(&storage.keys.empty[at.key.slot]));
    if (keys.first == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage.queries.empty[at.query.slot]));
  }

  // Of the warp's rows.
  __device__ __forceinline__ int64_t first_row(const PrefillWork& work) const {
    return int64_t{work.tile} * kTile.rows() + warp * kWarpRows;
  }

  // Waits for the next row tile. False: there are no more.
  __device__ __forceinline__ bool find_rows(const Position& at, KeyRange& keys) const {
    const int slot = at.work.slot;
    ptx::mbarrier_wait(ptx::shared_address(&storage.works.full[slot]), at.work.parity);
    const PrefillWork& work = storage.work[slot];
    if (work.tile < 0) return false;
    const int2* bounds = storage.bounds[slot] + warp * kWarpRows;  // never decrease from row to row
    keys = {(work.key_count - 1) / kKeys * kKeys, bounds[kWarpRows - 1].x, bounds[0].y};
    return true;
  }

  static __device__ __forceinline__ void clear(Output& out) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][n][e] = 0.0f;
    }
    ptx::hold(out[0]);
  }

  __device__ __forceinline__ void wait_queries(const Position& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.queries.full[at.query.slot]), at.query.parity);
  }
  __device__ __forceinline__ void wait_keys(const KeyRing& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.keys.full[at.slot]), at.parity);
  }
  __device__ __forceinline__ void wait_values(const KeyRing& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&storage.values.full[at.slot]), at.parity);
  }

  // Starts scores = q k^T.
  __device__ __forceinline__ void multiply_keys(Scores& scores, const Position& at) const {
    const uint64_t queries = QueryTile::rows_operand(ptx::shared_address(storage.q[at.query.slot]),
                                                     warpgroup * catalog::Sm90PrefillTile::kWarpgroupRows);
    const uint64_t keys = KeyTile::rows_operand(ptx::shared_address(storage.k[at.key.slot]));
    ptx::hold(scores[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / tile::kWgmmaDepth; ++d) {
      ptx::Wgmma<T, kKeys>::shared(scores[0], queries + QueryTile::rows_operand_step(d),
                                   keys + KeyTile::rows_operand_step(d), d != 0);
    }
    ptx::wgmma_commit();
  }

  // Starts out += weights v.
  __device__ __forceinline__ void multiply_values(Output& out, const Weights& weights, const KeyRing& at) const {
    ptx::hold(out[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kHeadDim / kOutColumns; ++part) {
      const uint64_t values =
          KeyTile::columns_operand(ptx::shared_address(storage.v[at.slot]), part * kOutColumns / tile::kBlockColumns);
      auto& columns = reinterpret_cast<float(&)[kOutColumns / 8][4]>(out[0][part * kOutColumns / 8]);
#pragma unroll
      for (int n = 0; n < kKeys / tile::kWgmmaDepth; ++n) {
        ptx::Wgmma<T, kOutColumns>::registers(columns, weights[n], values + KeyTile::columns_operand_step(n), 1);
      }
    }
    ptx::wgmma_commit();
  }

  // Scores of the keys from keys.first on become probabilities. Returns whether out is to be multiplied by `factor`.
  __device__ __forceinline__ bool exponentiate(Scores& scores, Rows& rows, float (&factor)[2], const Position& at,
                                               const KeyRange& keys) const {
    if (params.score.transform) transform_scores(scores, params.score);
    if (keys.first < keys.whole_from || keys.first + kKeys > keys.whole_to) {
      apply_bounds(scores, storage.bounds[at.work.slot] + warp * kWarpRows, keys.first, lane);
    }
    float highest[2];
    find_highest(highest, scores);
    const bool raised = rows.raise_references(highest, params.score.to_log2, factor);
    rows.exponentiate(scores, params.score.to_log2);
    return raised;
  }

  // Accumulators of m64nN lie as operands of the next product do.
  static __device__ __forceinline__ void pack_weights(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int n = 0; n < kKeys / tile::kWgmmaDepth; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = scores[0][2 * n + i / 2] + i % 2 * 2;
        weights[n][i] = ptx::pack<T>(pair[0], pair[1]);
      }
    }
  }
};

}  // namespace plait::cuda::sm90
