// Launches the kernels of a split_d backward call: delta, then dK and dV, then dQ.
// Called by the translation units made from variant.cu.in.
#pragma once

#include "cuda/mma/backward/launch.cuh"
#include "cuda/mma/split_d/backward_kernel.cuh"
#include "cuda/mma/split_d/split_d.hpp"

namespace plait::cuda::mma {

template <class T, int kHeadDim, int kChoice, Side kSide>
void launch_split_d_side(BackwardParams params, cudaStream_t stream) {
  constexpr catalog::SplitDBackwardTilePair kTiles = catalog::split_d_backward_tiles(kHeadDim)[kChoice];
  constexpr catalog::SplitDBackwardTile kTile = kSide == Side::kRows ? kTiles.rows : kTiles.keys;
  using C = SplitDConfig<T, kTile, kSide>;
  static_assert(sizeof(SplitDBackwardStorage<C>) == kTile.fixed_bytes());
  const AttentionProblem& p = params.problem;
  if (p.batch == 0 && !p.packed) return;  // packed: the rows past cu_seqlens[-1]
  params.order = block_order<C>(p);
  launch(split_d_backward_kernel<T, kHeadDim, kChoice, kSide>, params.order.tiles * params.order.units, C::kThreads,
         static_cast<int>(kTile.smem_bytes()), stream, params);
}

// Compiles the tiles of the bucket (the last of a list may repeat) and launches `chosen` of them.
template <class T, int kHeadDim, int kChoice = 0>
void launch_chosen_split_d_sides(const catalog::SplitDBackwardTilePair& chosen, const BackwardParams& params,
                                 cudaStream_t stream) {
  constexpr const catalog::SplitDBackwardTiles& kTiles = catalog::split_d_backward_tiles(kHeadDim);
  if (chosen == kTiles[kChoice]) {
    launch_split_d_side<T, kHeadDim, kChoice, Side::kKeysAlone>(params, stream);
    launch_split_d_side<T, kHeadDim, kChoice, Side::kRows>(params, stream);
    return;
  }
  if constexpr (kChoice + 1 < kTiles.size() && !(kTiles[kChoice + 1] == kTiles[kChoice])) {
    launch_chosen_split_d_sides<T, kHeadDim, kChoice + 1>(chosen, params, stream);
  } else {
    throw Error(ErrorCode::kInternal, "device", "a tile was planned that the bucket does not have");
  }
}

template <class T, int kHeadDim>
void launch_split_d_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                             int64_t smem_limit_bytes, cudaStream_t stream) {
  const catalog::SplitDBackwardTilePair* tiles =
      catalog::split_d_backward_tile(std::max(problem.head_dim, problem.head_dim_v), smem_limit_bytes);
  if (tiles == nullptr) throw Error(ErrorCode::kInternal, "device", "planned for more shared memory than it has");
  const BackwardWorkspace parts(problem, workspace);
  aux::launch_delta(problem, tensors, parts.delta, stream, {parts.row_pairs});
  launch_chosen_split_d_sides<T, kHeadDim>(*tiles, backward_params(problem, tensors, parts), stream);
}

}  // namespace plait::cuda::mma
