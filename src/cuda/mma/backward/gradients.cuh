// Where a block keeps what, and the products that consume P and dS: dK and dV (dQ) in registers, dQ of the stream tile.
// Called by step.cuh.
#pragma once

#include "cuda/mma/backward/block.cuh"
#include "cuda/mma/backward/softmax.cuh"

namespace plait::cuda::mma {

// kKeys: dK and dV of the warp's keys. kRows: dQ of its rows; dv does not exist (the compiler drops it).
template <class C>
struct Gradients {
  float first[C::kScoreM][2 * C::kGradN][4], second[C::kScoreM][2 * C::kGradN][4];
};

template <class C>
struct Place {  // of a warp in the block, and of the block's shared memory
  uint32_t shared;
  int warp, r, s;  // r: which resident rows, s: which stream rows

  // Where step `step` has its tiles.
  __device__ __forceinline__ uint32_t stream_first(int step) const {
    return shared + C::kStreamBytes + step % C::kStages * 2 * C::kTile.stream_bytes();
  }
  __device__ __forceinline__ uint32_t stream_second(int step) const {
    return stream_first(step) + C::kTile.stream_bytes();
  }
  __device__ __forceinline__ uint32_t ds_tile(int step) const {
    return shared + C::kDsBytes + step % C::kTile.score_buffers() * C::kTile.score_bytes();
  }
  __device__ __forceinline__ uint32_t p_tile(int step) const {
    return shared + C::kPBytes + step % C::kTile.score_buffers() * C::kTile.score_bytes();
  }
  // RowPairs of the block's softmax rows, and of the warp's.
  __device__ __forceinline__ uint32_t row_tile(int step) const {
    return shared + C::kRowBytes + step % C::kStages * C::kStream * 8;
  }
  __device__ __forceinline__ uint32_t row_pairs(int step) const {
    return C::kKeysResident ? row_tile(step) + s * C::kWarpStream * 8 : row_tile(0) + r * C::kWarpRows * 8;
  }
};

// Where the lane stores its first element of the warp's dS.
template <class C>
__device__ __forceinline__ uint32_t ds_address(const Place<C>& w, int step) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = w.r * C::kWarpRows + lane / 4, chunk = w.s * C::kWarpStream / tile::kChunkElems;
  return w.ds_tile(step) + tile::Swizzle<C::kStream>::offset(row, chunk) * 2 + lane % 4 * 4;
}
template <class C>
__device__ __forceinline__ void store_ds_block(uint32_t address, const Packed<C>& ds, int i, int j) {
  constexpr int kMixed = DownAddress<C::kStream>::kMixedBits;
  const uint32_t at = (address ^ ((j & kMixed) * 16)) + (j & ~kMixed) * 16 + 16 * i * C::kStream * 2;
  ptx::store_shared_4(at, ds[i][j / 2][j % 2 * 2]);
  ptx::store_shared_4(at + 8 * C::kStream * 2, ds[i][j / 2][j % 2 * 2 + 1]);
}

// P of warp (r, s) as operand registers, for the other warps of the same resident rows.
template <class C>
__device__ __forceinline__ uint32_t p_address(const Place<C>& w, int step, int s) {
  constexpr int kWarpBytes = C::kScoreM * C::kScoreK * 32 * 16;
  return w.p_tile(step) + (w.r * C::kWarpsS + s) * kWarpBytes + static_cast<int>(threadIdx.x % 32) * 16;
}
template <class C>
__device__ __forceinline__ void store_p(const Place<C>& w, int step, const Packed<C>& p) {
#pragma unroll
  for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
    for (int k = 0; k < C::kScoreK; ++k) {
      ptx::store_shared_16(p_address(w, step, w.s) + (i * C::kScoreK + k) * 32 * 16,
                           {p[i][k][0], p[i][k][1], p[i][k][2], p[i][k][3]});
    }
  }
}

struct Nothing {
  __device__ __forceinline__ void operator()(int) const {}
};

// dV and dK (dQ) += the stream rows of warp (r, s), with P and dS at hand.
template <class C, class Between = Nothing>
__device__ __forceinline__ void accumulate_p(const Place<C>& w, int step, int s, const Packed<C>& p, Gradients<C>& sum,
                                             const Between& between = {}) {
  accumulate<typename C::T, C::kWarpsS>(
      sum.second, p, DownAddress<C::kHeadDim>(w.stream_second(step), s * C::kWarpStream, w.s), between);
}
template <class C>
__device__ __forceinline__ void accumulate_ds(const Place<C>& w, int step, int s, const Packed<C>& ds,
                                              Gradients<C>& sum) {
  accumulate<typename C::T, C::kWarpsS>(
      sum.first, ds, DownAddress<C::kHeadDim>(w.stream_first(step), s * C::kWarpStream, w.s), Nothing());
}

// The same with P and dS of another warp, from shared memory.
template <class C>
__device__ __forceinline__ void accumulate_other(const Place<C>& w, int step, int s, Gradients<C>& sum) {
  Packed<C> p, ds;
  const DownAddress<C::kStream> ds_block(w.ds_tile(step), w.r * C::kWarpRows, s * C::kScoreK);
#pragma unroll
  for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
    for (int k = 0; k < C::kScoreK; ++k) {
      if constexpr (C::kKeysResident) {
        const uint4 v = ptx::load_shared_16(p_address(w, step, s) + (i * C::kScoreK + k) * 32 * 16);
        p[i][k][0] = v.x, p[i][k][1] = v.y, p[i][k][2] = v.z, p[i][k][3] = v.w;
      }
      ptx::ldmatrix_x4(ds[i][k], ds_block.at(16 * i, k));
    }
  }
  if constexpr (C::kKeysResident) accumulate_p<C>(w, step, s, p, sum);
  accumulate_ds<C>(w, step, s, ds, sum);
}

// dQ of the stream tile, this warp's part.
template <class C>
struct StreamDq {
  float blocks[C::kDqM][2 * C::kDqN][4] = {};

  __device__ __forceinline__ void multiply(const Place<C>& w, int step) {
    const int m = w.warp / C::kDqWarpsN, n = w.warp % C::kDqWarpsN;
    multiply_columns<typename C::T, C::kDqM, C::kDqN, C::kDqWarpsN, C::kResident, C::kStream, C::kHeadDim>(
        blocks, AcrossAddress<C::kStream>(w.ds_tile(step), 0, m * C::kDqM),
        DownAddress<C::kHeadDim>(w.shared + C::kFirstBytes, 0, n));
  }
  // To the fp32 workspace in fragment order: 16 contiguous bytes a lane.
  __device__ __forceinline__ void add_to(const Place<C>& w, float* tile) const {
    constexpr int kBlocks = C::kDqM * 2 * C::kDqN;
    float* to = tile + (w.warp * kBlocks * 32 + static_cast<int>(threadIdx.x % 32)) * 4;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      ptx::add_global_4(to + i * 32 * 4, blocks[i / (2 * C::kDqN)][i % (2 * C::kDqN)]);
    }
  }
};

}  // namespace plait::cuda::mma
