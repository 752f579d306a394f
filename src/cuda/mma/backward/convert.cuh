// dQ from the fp32 workspace of side kKeys to rows.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/backward/block.cuh"
#include "cuda/mma/backward/products.cuh"
#include "cuda/mma/backward/tile_io.cuh"

namespace plait::cuda::mma {

// One block for each row tile, query head and pass.
template <class C>
__global__ __launch_bounds__(C::kThreads) void convert_dq_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ __align__(128) typename C::T shared[C::kDqTileElems];
  constexpr int kM = C::kDqM, kN = C::kDqN;
  const AttentionProblem& p = params.problem;
  const int64_t passes = p.joint_passes(), unit = blockIdx.x % (p.heads_q * passes);
  const TileOfSequence at = find_tile(p, params.tensors, blockIdx.x / (p.heads_q * passes), C::kStream, false);
  if (at.sequence < 0) return;
  const DeviceSequence s = device_sequence(p, params.tensors, at.sequence);
  const int64_t head = unit / passes, pass = unit % passes;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const float4* from = reinterpret_cast<const float4*>(
      params.dq_sum + dq_offset<C>(params, s, at.sequence, head, pass) + at.tile * C::kDqTileElems);
  float dq[kM][2 * kN][4];
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kN; ++j) {
      const float4 v = from[((warp * kM + i) * 2 * kN + j) * 32 + lane];
      dq[i][j][0] = v.x, dq[i][j][1] = v.y, dq[i][j][2] = v.z, dq[i][j][3] = v.w;
    }
  }
  const uint32_t target = ptx::shared_address(shared);
  round_to_tile<typename C::T, kM, kN, C::kDqWarpsN, C::kHeadDim>(target, warp / C::kDqWarpsN * kM * 16,
                                                                  warp % C::kDqWarpsN, dq, static_cast<float>(p.scale));
  __syncthreads();
  store_tile<typename C::T, C::kStream, C::kHeadDim, C::kThreads>(
      target, query_rows(p, params.tensors.dq, s, head, pass, p.head_dim), static_cast<int>(at.tile) * C::kStream,
      params.vector_dq);
}

}  // namespace plait::cuda::mma
