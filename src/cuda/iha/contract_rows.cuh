// The warps that make narrow rows: narrow[s] = turn back(sum_r weight(r, s) * wide[r]), as mma of columns (m) by
// narrow heads (n) over wide rows (k), so that 20 heads cost three tiles of eight.
// Called by contract.cuh.
#pragma once

#include "cuda/iha/stage.cuh"
#include "cuda/ptx/shared.cuh"

namespace plait::cuda::iha {

// Weights [k16 steps][n8 tiles][32 lanes]: operand B, high halves in x and y, low halves in z and w.
template <class T>
__device__ inline void fill_row_weights(const Job& job, uint4* weights, int tiles) {
  const int count = (job.wide_count + 15) / 16 * tiles * 32;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
    const int lane = i % 32, head = i / 32 % tiles * kTileElems + lane / 4, step = i / 32 / tiles;
    uint32_t high[2], low[2];
    for (int r = 0; r < 2; ++r) {
      float pair[2];
      for (int b = 0; b < 2; ++b) {
        const int row = step * 16 + r * 8 + lane % 4 * 2 + b;
        pair[b] = row < job.wide_count && head < job.heads
                      ? load_weight<T>(job.weights, job.pseudo, job.wide_begin + row, head)
                      : 0.0f;
      }
      const Halves<T> a(pair[0]), b(pair[1]);
      high[r] = ptx::pack<T>(a.high, b.high), low[r] = ptx::pack<T>(a.low, b.low);
    }
    weights[i] = {high[0], high[1], low[0], low[1]};
  }
}

template <class T, int kNarrowTiles, int kColumns>
class RowsRole {
  static constexpr int kPitch = Block<kColumns>::kPitch, kUnits = kColumns / ContractLayout::kUnit;
  static constexpr int kTiles = kNarrowTiles < 4 ? kNarrowTiles : 4;  // of one warp
  static constexpr int kGroups = kNarrowTiles / kTiles, kSlices = ContractLayout::kRowsWarps / kGroups;
  static constexpr int kHalves = ContractLayout::kUnit / 16;

 public:
  __device__ __forceinline__ RowsRole(const Job& job, const Block<kColumns>& block, int warp, int lane)
      : lane_(lane),
        slice_(warp / kGroups),
        first_(warp % kGroups * kTiles),
        steps_((block.wide + 15) / 16),
        zeros_(block.zeros()),
        split_(job.weights.is_float),
        pairs_(job.rotary.pairs),
        weights_(ptx::shared_address(block.weights() + first_ * 32 + lane)) {
    const int row = lane % 8 + lane / 16 * 8;
    from_ = row * kPitch + lane / 8 % 2 * 16;
    last_row_exists_ = (steps_ - 1) * 16 + row < block.wide;
    left_ = job.rotary.by_row ? 0 : job.rotary.dim / 2 - block.first_tile * (kTileElems / 2);
  }

  // Makes the narrow rows of this warp's units of a stage in `staging`.
  __device__ __forceinline__ void work(const ContractLayout& layout, const Block<kColumns>& block,
                                       const unsigned char* stage, unsigned char* staging) const {
#pragma unroll 1
    for (int unit = slice_; unit < layout.tokens * kUnits; unit += kSlices) {
      const int token = unit / kUnits, column = unit % kUnits * ContractLayout::kUnit;
      const unsigned char* from = stage + token * block.token_bytes;
      float acc[kHalves][kTiles][4] = {};
      multiply(acc, ptx::shared_address(from) + from_ + column * 2);
      unsigned char* to = staging + token * block.heads * kPitch + column * 2;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int pair = column / 2 + h * kTileElems;
        if (left_ > pair) {
          const float* cos = reinterpret_cast<const float*>(from + block.table_offset) + pair;
          turn(acc[h], cos, cos + kColumns / 2, left_ - pair);
        }
        put(acc[h], to + h * 32, block.heads);
      }
    }
  }

 private:
  __device__ __forceinline__ void multiply(float (&acc)[kHalves][kTiles][4], uint32_t from) const {
    // The operands of a step are loaded while the step before it is multiplied.
    Operands even, odd;
    uint32_t weights = weights_;
    const auto load = [&](Operands& to, int k) {
      const bool exists = k + 1 < steps_ || last_row_exists_;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) ptx::ldmatrix_x4_trans(to.a[h], exists ? from + h * 32 : zeros_);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) to.w[n] = ptx::load_shared_16(weights + n * kFragmentBytes);
      from += 16 * kPitch, weights += kNarrowTiles * kFragmentBytes;
    };
    load(even, 0);
#pragma unroll 1
    for (int k = 0; k < steps_; k += 2) {
      if (k + 1 < steps_) load(odd, k + 1);
      add(acc, even);
      if (k + 1 == steps_) break;
      if (k + 2 < steps_) load(even, k + 2);
      add(acc, odd);
    }
  }

  // Of one k16 step: wide rows, weights.
  struct Operands {
    uint32_t a[kHalves][4];
    uint4 w[kTiles];
  };
  __device__ __forceinline__ void add(float (&acc)[kHalves][kTiles][4], const Operands& o) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) ptx::mma_m16n8k16<T>(acc[h][n], o.a[h], o.w[n].x, o.w[n].y);
    }
    if (!split_) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) ptx::mma_m16n8k16<T>(acc[h][n], o.a[h], o.w[n].z, o.w[n].w);
    }
  }

  // Backwards. A thread holds column lane / 4 of both tiles.
  __device__ __forceinline__ void turn(float (&acc)[kTiles][4], const float* cos, const float* sin, int left) const {
    const int column = lane_ / 4;
    if (!pairs_) {
      const float c = cos[column], s = sin[column];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        turn_pair(acc[n][0], acc[n][2], c, -s);
        turn_pair(acc[n][1], acc[n][3], c, -s);
      }
      return;
    }
    const float side = column % 2 == 0 ? 1.0f : -1.0f;  // of a pair; the other is 4 lanes on
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = i / 2 * 4 + column / 2;
      const float c = cos[pair], s = side * sin[pair];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float other = __shfl_xor_sync(kAllLanes, acc[n][i], 4);
        if (pair < left) acc[n][i] = acc[n][i] * c + other * s;
      }
    }
  }

  __device__ __forceinline__ void put(const float (&acc)[kTiles][4], unsigned char* staging, int heads) const {
    const int row = first_ * kTileElems + lane_ / 4;
    unsigned char* to = staging + row * kPitch + lane_ % 4 * 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n, to += kTileElems * kPitch) {
      const uint32_t left = ptx::transpose_8x8(ptx::pack<T>(acc[n][0], acc[n][1]));
      const uint32_t right = ptx::transpose_8x8(ptx::pack<T>(acc[n][2], acc[n][3]));
      if (row + n * kTileElems < heads) {
        *reinterpret_cast<uint32_t*>(to) = left;
        *reinterpret_cast<uint32_t*>(to + 16) = right;
      }
    }
  }

  int lane_, slice_, first_, steps_, from_, left_;
  uint32_t zeros_;
  bool split_, pairs_, last_row_exists_;
  uint32_t weights_;
};

}  // namespace plait::cuda::iha
