// What a consumer knows, and its scores: where they come from, masks, references.
// Called by consumer.cuh.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm90/prefill/products.cuh"
#include "cuda/sm90/prefill/reader.cuh"
#include "cuda/sm90/prefill/softmax.cuh"

namespace plait::cuda::sm90 {

// scores = q k^T of the 16 rows of QueryTile from `row` on and all rows of KeyTile.
template <class T, class QueryTile, class KeyTile, int kHeadDim, int kKeyTiles>
__device__ __forceinline__ void multiply_keys_by_warp(float (&scores)[kKeyTiles][4], uint32_t q, int row, uint32_t k,
                                                      int lane) {
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < kHeadDim / 16; ++d) {
    uint32_t queries[4];
    ptx::ldmatrix_x4(queries, q + QueryTile::chunk_bytes(row + lane % 16, 2 * d + lane / 16));
    const uint32_t first = k + KeyTile::chunk_bytes(lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      uint32_t keys[4];
      ptx::ldmatrix_x4(keys, first + n * tile::kSwizzleAlignBytes);
      ptx::mma_m16n8k16<T>(scores[n], queries, keys[0], keys[1]);
      ptx::mma_m16n8k16<T>(scores[n + 1], queries, keys[2], keys[3]);
    }
  }
}

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillScores : PrefillReader<T, kTile> {
  using Reader = PrefillReader<T, kTile>;
  using Reader::kKeys, Reader::params, Reader::storage, Reader::warpgroup, Reader::lane;
  using Reader::release, Reader::uniform, Reader::warp;
  using typename Reader::KeyRing, typename Reader::Position, typename Reader::Storage;
  using Products = PrefillProducts<T, kTile>;
  using Rows = SoftmaxRows<2>;
  static constexpr int kHeadDim = kTile.head_dim, kWarpRows = 16, kKeyTiles = kKeys / 8;
  static constexpr bool kStaged = kTile.stages_output(), kBySums = kTile.by_sums;
  static_assert(!kBySums || kStaged);  // then queries are there as long as scores may be computed once more

  struct State {
    typename Products::Output out;
    typename Products::Scores scores;
    typename Products::Weights weights;  // of the tile of keys at `at.key`, whose values wait for them
    Rows rows;
    float factor[2];
    Position at;
    WarpKeys keys;
    int settled;   // all rows of the warp have seen a key
    int fresh;     // nothing is in `out`; as `settled`, a number that the compiler knows to be the same for all lanes
    KeyRing next;  // tile of keys
    bool landed;   // it
  };

  __device__ __forceinline__ void multiply_keys(State& s) const {
    Products::multiply_keys(s.scores, storage.q[0], s.at.query.slot, storage.k[0], s.at.key.slot, warpgroup);
  }

  // The warp is done with these keys, and if they are the last ones with the queries.
  __device__ __forceinline__ void release_scored(const State& s) const {
    release(storage.keys.empty[s.at.key.slot]);
    if (!kStaged && s.keys.first <= s.keys.end) release(storage.queries_empty[s.at.query.slot]);
  }

  // Where the keys behind this tile are, and whether they have landed.
  __device__ __forceinline__ void look(State& s) const {
    s.next = s.at.key;
    s.next.advance();
    s.landed = ptx::mbarrier_test(ptx::shared_address(&storage.keys.full[s.next.slot]), s.next.parity);
  }

  // Softcap and masks, where the tile of keys is not whole.
  __device__ __forceinline__ void mask(State& s) const {
    const WarpKeys& keys = s.keys;
    if (keys.first >= keys.whole_from && keys.first + kKeys <= keys.whole_to) return;
    if (params.score.transform) transform_scores(s.scores, params.score);
    const int2* bounds = storage.bounds[s.at.work.slot] + warp() * kWarpRows;
    if (keys.first < keys.whole_from) {
      apply_bounds(s.scores, bounds, keys.first, lane);
    } else {
      apply_bounds<false>(s.scores, bounds, keys.first, lane);
    }
  }

  // References by the maxima of scores. Returns whether out is to be multiplied by `factor`.
  __device__ __forceinline__ bool raise(State& s) const {
    const bool raised = raise_references(s.scores, params.score.to_log2, s.rows, s.factor);
    if (kBySums) {
      const bool all = fminf(s.rows.reference[0], s.rows.reference[1]) > -FLT_MAX;
      s.settled = uniform(__all_sync(kAllLanes, all));
    }
    return raised;
  }

  // Raises references by the sums of probabilities, in place of the maxima of scores. Where one is too high, once more
  // from the scores. Returns as raise().
  __device__ __forceinline__ bool recover(State& s, float (&sum)[2]) const {
    if (__all_sync(kAllLanes, sum[0] <= kMostRaise && sum[1] <= kMostRaise)) {
      raise_by_sums(s.scores, sum, s.rows, s.factor);
      return true;
    }
    multiply_keys_by_warp<T, typename Storage::QueryTile, typename Storage::KeyTile, kHeadDim>(
        s.scores[0], ptx::shared_address(storage.q[s.at.query.slot]), warp() * kWarpRows,
        ptx::shared_address(storage.k[s.at.key.slot]), lane);
    const bool raised = raise_references(s.scores, params.score.to_log2, s.rows, s.factor);
    sum[0] = sum[1] = 0.0f;
    exponentiate<0, kKeyTiles>(s.scores, params.score.to_log2, s.rows, sum);
    return raised;
  }
};

}  // namespace plait::cuda::sm90
