// The decode kernel: a block takes its share of the keys of all units, and the last block of a unit merges the parts.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/decode/combine.cuh"

namespace plait::cuda::mma {

// Called by the whole block, which no longer uses `storage`.
template <class T, catalog::DecodeTile kTile>
__device__ __forceinline__ void attend_segment(const DecodeParams& params, DecodeStorage<T, kTile>& storage,
                                               const DecodeSegment& own) {
  using Loop = DecodeMainloop<T, kTile>;
  __syncthreads();
  if (threadIdx.x == 0) storage.segment = own;
  __syncthreads();
  const DecodeSegment& segment = storage.segment;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  typename Loop::Output out{};
  SoftmaxRows<Loop::kRows> rows;
  Loop{params, storage, warp, lane}.run(segment, out, rows);
  const Combine<T, kTile> combine{params, storage, warp, lane};
  combine.finish(segment, out, rows);
  ptx::wait_for_grid();  // the counters are zero
  combine.arrive(segment);
}

// kSize, kGpu: which of the bucket's tiles.
template <class T, int kHeadDim, int kSize, int kGpu>
__global__ void __launch_bounds__(catalog::decode_tiles(kHeadDim)[kSize][kGpu].threads(),
                                  catalog::decode_tiles(kHeadDim)[kSize][kGpu].most_blocks_per_multiprocessor)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  constexpr catalog::DecodeTile kTile = catalog::decode_tiles(kHeadDim)[kSize][kGpu];
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<DecodeStorage<T, kTile>*>(shared);
  if (params.problem.cached) ptx::wait_for_grid();  // new keys and turned queries
  const DecodeSchedule schedule{params, kTile.step_keys};
  const bool fixed = params.split_keys > 0;
  const unsigned steps = schedule.find(0xffffffffu).unit_begin;
  const Shares shares(steps, gridDim.x, fixed ? 1 : kFewestSteps);
  if (blockIdx.x >= shares.workers) return;
  const unsigned end = fixed ? steps : shares.begin(blockIdx.x + 1);
#pragma unroll 1
  for (unsigned step = fixed ? blockIdx.x : shares.begin(blockIdx.x); step < end;) {
    const StepPlace at = schedule.find(step);
    const unsigned upto = fixed ? step + gridDim.x : min(end, at.unit_begin + at.keys.steps);
    attend_segment<T, kTile>(params, storage,
                             fixed ? schedule.split(at, step) : schedule.share(at, shares, blockIdx.x, step, upto));
    step = upto;
  }
}

}  // namespace plait::cuda::mma
