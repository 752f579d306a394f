// Both products of a warpgroup: scores from queries and keys, O from probabilities and values.
// Called by scores.cuh and consumer.cuh.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/prefill/storage.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillProducts {
  using QueryTile = typename PrefillStorage<T, kTile>::QueryTile;
  using KeyTile = typename PrefillStorage<T, kTile>::KeyTile;
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.tile_keys;

  using Scores = float[1][kKeys / 8][4];
  using Output = float[1][kHeadDim / 8][4];
  using Weights = uint32_t[kKeys / tile::kWgmmaDepth][4];  // probabilities as operands

  // Starts scores = q k^T. `q`, `k`: the slots of queries and keys, of which it takes one each.
  static __device__ __forceinline__ void multiply_keys(Scores& scores, const char* q, int q_slot, const char* k,
                                                       int k_slot, int warpgroup) {
    const int row = warpgroup * kTile.kWarpgroupRows % QueryTile::kRows;
    const uint64_t rows = QueryTile::rows_operand(ptx::shared_address(q), row);
    const uint64_t queries = tile::advance_descriptor(rows, q_slot * tile::descriptor_step(QueryTile::kBytes));
    const uint64_t keys = tile::advance_descriptor(KeyTile::rows_operand(ptx::shared_address(k)),
                                                   k_slot * tile::descriptor_step(KeyTile::kBytes));
    ptx::hold(scores[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / tile::kWgmmaDepth; ++d) {
      ptx::Wgmma<T, kKeys>::shared(scores[0], tile::advance_descriptor(queries, QueryTile::rows_operand_step(d)),
                                   tile::advance_descriptor(keys, KeyTile::rows_operand_step(d)), d != 0);
    }
    ptx::wgmma_commit();
  }

  // Starts out += weights v, or out = weights v. `v`: the slots of values.
  static __device__ __forceinline__ void multiply_values(Output& out, const Weights& weights, const char* v, int v_slot,
                                                         bool adds) {
    const uint64_t first = KeyTile::columns_operand(ptx::shared_address(v));
    const uint64_t values = tile::advance_descriptor(first, v_slot * tile::descriptor_step(KeyTile::kBytes));
    ptx::hold(out[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / tile::kWgmmaDepth; ++n) {
      ptx::Wgmma<T, kHeadDim>::registers(out[0], weights[n],
                                         tile::advance_descriptor(values, KeyTile::columns_operand_step(n)),
                                         n == 0 ? static_cast<int>(adds) : 1);
    }
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ void clear(Output& out) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][n][e] = 0.0f;
    }
    ptx::hold(out[0]);
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
