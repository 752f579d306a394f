// The split_d backward kernel: one block owns a resident tile and walks the stream tiles that meet it.
// Called by backward_launch.cuh.
#pragma once

#include "cuda/mma/split_d/backward.cuh"

namespace plait::cuda::mma {

template <class C>
__device__ __forceinline__ void run_split_d_backward(const BackwardParams& params, SplitDBackwardStorage<C>& storage) {
  using Block = SplitDBackward<C>;
  const Block block{params, storage, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)};
  {
    const BlockState state = make_state<C>(params);
    if (!state.work.exists) return;
    if (threadIdx.x == 0) storage.state = state;
  }
  __syncthreads();
  const int steps = storage.state.steps;
  typename Block::Gradient first = {}, second = {};
  if (steps > 0) {
    block.load_resident();
    block.template load_stream<true, true>(0);
  }
  ptx::cp_async_commit();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's tiles are there; everyone has left the step before
    // Half of the warps copy before their products, half behind them, so that each scheduler has a warp that
    // multiplies.
    typename C::Sum::Partial partial = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (C::kStages == 2 && step + 1 < steps && half == block.warp / (catalog::kSplitDWarps / 2)) {
        block.template load_stream<true, !C::kSecondLate>(step + 1);
        ptx::cp_async_commit();
      }
      if (half == 0) block.multiply_scores(partial, step);
    }
    C::Sum::put(block.exchange(), partial, block.source(), block.lane);
    __syncthreads();  // partial sums of all warps are there, v is read
    if (C::kSecondLate && !C::kKeysResident && step + 1 < steps) {
      block.template load_stream<false, true>(step + 1);
      ptx::cp_async_commit();
    }
    block.differentiate(partial, step);
    __syncthreads();  // P and dS are there
    if constexpr (C::kSecondLate && C::kKeysResident) {
      block.add_second(second, step);
      if (step + 1 < steps) {
        __syncthreads();  // dO is read
        block.template load_stream<false, true>(step + 1);
        ptx::cp_async_commit();
      }
      block.add_first(first, step);
      continue;
    }
    block.add_first(first, step);
    if constexpr (C::kKeysResident) block.add_second(second, step);
    if (C::kStages == 1 && step + 1 < steps) {
      __syncthreads();  // the stream tiles are read
      block.template load_stream<true, true>(step + 1);
      ptx::cp_async_commit();
    }
  }
  const AttentionTensors& t = params.tensors;
  const float scale = static_cast<float>(params.problem.scale);
  if constexpr (C::kKeysResident) {
    block.store(t.dk, params.problem.head_dim, params.vector_dk, first, scale);
    block.store(t.dv, params.problem.head_dim_v, params.vector_dv, second, 1.0f);
  } else {
    block.store(t.dq, params.problem.head_dim, params.vector_dq, first, scale);
  }
}

// kChoice: which of the bucket's tiles.
template <class T, int kHeadDim, int kChoice, Side kSide>
__global__ void __launch_bounds__(catalog::split_d_backward_tiles(kHeadDim)[kChoice].keys.threads(), 1)
    split_d_backward_kernel(const __grid_constant__ BackwardParams params) {
  constexpr catalog::SplitDBackwardTilePair kTiles = catalog::split_d_backward_tiles(kHeadDim)[kChoice];
  using C = SplitDConfig<T, kSide == Side::kRows ? kTiles.rows : kTiles.keys, kSide>;
  extern __shared__ __align__(128) char split_d_shared[];
  if constexpr (C::kTile.smem_bytes() <= kArchSharedBytes) {
    run_split_d_backward<C>(params, *reinterpret_cast<SplitDBackwardStorage<C>*>(split_d_shared));
  }
}

}  // namespace plait::cuda::mma
