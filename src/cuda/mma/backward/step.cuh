// What a block does with one stream tile: scores, P, dS, and the products that consume them.
// Called by kernel.cuh.
#pragma once

#include "cuda/mma/backward/gradients.cuh"

namespace plait::cuda::mma {

// The warp's rows of the resident tiles, as operands of the scores (kHeld; else empty).
template <class C>
struct HeldTiles {
  Held<C> first, second;

  __device__ __forceinline__ void load(const Place<C>& w) {
    const int resident = w.r * C::kWarpRows;
    const DownAddress<C::kHeadDim> from_first(w.shared + C::kFirstBytes, resident, 0);
    const DownAddress<C::kHeadDim> from_second(w.shared + C::kSecondBytes, resident, 0);
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
#pragma unroll
      for (int i = 0; i < C::kScoreM; ++i) {
        load_rows(first.blocks[k][i], from_first, i, k);
        load_rows(second.blocks[k][i], from_second, i, k);
      }
    }
  }
};
// What multiply_rows takes its rows from.
template <class C>
__device__ __forceinline__ decltype(auto) score_rows(const Place<C>& w, const Held<C>& held, int tile_bytes) {
  if constexpr (C::kHeld) {
    return (held);
  } else {
    return DownAddress<C::kHeadDim>(w.shared + tile_bytes, w.r * C::kWarpRows, 0);
  }
}

// Operands of a step's first products, read ahead: behind a barrier they would be waited for.
template <class C>
struct FirstOperands {
  uint32_t rows[C::kScoreM][4], stream[C::kScoreK][4];

  __device__ __forceinline__ void load(const Place<C>& w, const HeldTiles<C>& held, int step) {
    const AcrossAddress<C::kHeadDim> from(w.stream_first(step), w.s * C::kWarpStream, 0);
#pragma unroll
    for (int i = 0; i < C::kScoreM; ++i) load_rows(rows[i], score_rows(w, held.first, C::kFirstBytes), i, 0);
#pragma unroll
    for (int j = 0; j < C::kScoreK; ++j) ptx::ldmatrix_x4(stream[j], from.at(16 * j, 0));
  }
};

// Scores and dP - delta of the warp. `between(k)`: during the products of dP.
template <class C, class Between>
__device__ __forceinline__ void multiply_scores(const Place<C>& w, const HeldTiles<C>& held,
                                                const FirstOperands<C>& first, int step, Scores<C>& s, Scores<C>& dp,
                                                const Between& between) {
  using T = typename C::T;
  const int stream = w.s * C::kWarpStream;
  const AcrossAddress<C::kHeadDim> stream_first(w.stream_first(step), stream, 0);
  const AcrossAddress<C::kHeadDim> stream_second(w.stream_second(step), stream, 0);
  multiply_blocks<T, C::kScoreM, C::kScoreK>(s, first.rows, first.stream);
  multiply_rows<T, 1, C::kScoreM, C::kScoreK>(s, score_rows(w, held.first, C::kFirstBytes), stream_first, Nothing());
  start_dp<C>(dp, w.row_pairs(step));
  multiply_rows<T, 0, C::kScoreM, C::kScoreK>(dp, score_rows(w, held.second, C::kSecondBytes), stream_second, between);
}

// First half of a step, for a tile that is seen whole: P and dS, in registers and (for other warps) in shared memory,
// and what the warp's own rows add to dK and dV. P is made during the products of dP, dS during those of dV.
template <class C>
__device__ __forceinline__ void score_whole_tile(const Place<C>& w, const HeldTiles<C>& held,
                                                 const FirstOperands<C>& first, const ScoreFactor& factor, int step,
                                                 Gradients<C>& sum) {
  constexpr int kM = C::kScoreM, kBlocks = kM * 2 * C::kScoreK;
  Scores<C> s = {}, dp;
  Packed<C> p, ds;
  const uint32_t rows = w.row_pairs(step), ds_to = ds_address(w, step);
  const auto make_p = [&](int k) {
    constexpr int kEach = (kBlocks + C::kHeadDim / 16 - 1) / (C::kHeadDim / 16);
#pragma unroll
    for (int block = k * kEach; block < (k + 1) * kEach && block < kBlocks; ++block) {
      exponentiate_block<C>(s, rows, factor, block % kM, block / kM);
      if constexpr (C::kKeysResident) pack_block<C>(p, s, block % kM, block / kM);
    }
  };
  const auto make_ds = [&](int block) {
    const int i = block % kM, j = block / kM;
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[i][j][e] *= s[i][j][e];
    pack_block<C>(ds, dp, i, j);
    if constexpr (C::kShares) store_ds_block<C>(ds_to, ds, i, j);
  };
  multiply_scores<C>(w, held, first, step, s, dp, make_p);
  if constexpr (C::kKeysResident) {
    if constexpr (C::kWarpsS > 1) store_p<C>(w, step, p);
    constexpr int kTurns = C::kScoreK * C::kGradN, kEach = (kBlocks + kTurns - 1) / kTurns;
    accumulate_p<C>(w, step, w.s, p, sum, [&](int turn) {
#pragma unroll
      for (int block = turn * kEach; block < (turn + 1) * kEach && block < kBlocks; ++block) make_ds(block);
    });
  } else {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) make_ds(block);
  }
  accumulate_ds<C>(w, step, w.s, ds, sum);
}

// The same for any tile.
template <class C>
__device__ __forceinline__ void score_any_tile(const Place<C>& w, const HeldTiles<C>& held,
                                               const FirstOperands<C>& first, const ScoreFactor& factor,
                                               const BlockState& state, int tile, int step, Gradients<C>& sum) {
  Scores<C> s = {}, dp;
  Packed<C> p, ds;
  multiply_scores<C>(w, held, first, step, s, dp, Nothing());
  if (factor.inverse_softcap != 0.0f) cap_scores<C>(s, factor);
  const int resident = state.work.tile * C::kResident + w.r * C::kWarpRows;
  const int stream = tile * C::kStream + w.s * C::kWarpStream;
  const WarpIntervals<C> seen(state.mask, C::kKeysResident ? stream : resident);
  differentiate<C>(s, dp, w.row_pairs(step), factor, seen, C::kKeysResident ? resident : stream);
  pack_all<C>(ds, dp);
  if constexpr (C::kShares) {
#pragma unroll
    for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * C::kScoreK; ++j) store_ds_block<C>(ds_address(w, step), ds, i, j);
    }
  }
  if constexpr (C::kKeysResident) {
    pack_all<C>(p, s);
    if constexpr (C::kWarpsS > 1) store_p<C>(w, step, p);
    accumulate_p<C>(w, step, w.s, p, sum);
  }
  accumulate_ds<C>(w, step, w.s, ds, sum);
}

template <class C>
__device__ __forceinline__ void score_step(const Place<C>& w, const HeldTiles<C>& held, const FirstOperands<C>& first,
                                           const BackwardParams& params, const BlockState& state, int step,
                                           Gradients<C>& sum) {
  const int tile = stream_tile(state, step).tile;
  if (tile >= state.whole.begin && tile < state.whole.end) {
    score_whole_tile<C>(w, held, first, params.factor, step, sum);
  } else {
    score_any_tile<C>(w, held, first, params.factor, state, tile, step, sum);
  }
}

// Second half, behind a barrier: what takes P and dS of other warps. `ahead`: reads operands of the next step.
template <class C, class Ahead>
__device__ __forceinline__ void gather_step(const Place<C>& w, float* dq_tile, int step, Gradients<C>& sum,
                                            const Ahead& ahead) {
#pragma unroll
  for (int other = 1; other < C::kWarpsS; ++other) accumulate_other<C>(w, step, (w.s + other) % C::kWarpsS, sum);
  if constexpr (C::kAddsDq) {
    StreamDq<C> dq;
    dq.multiply(w, step);
    ahead();
    dq.add_to(w, dq_tile);
  } else {
    ahead();
  }
}

}  // namespace plait::cuda::mma
