// The decode kernel: a block takes its share of the keys of all units, and the last block of a unit merges the parts.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/decode/combine.cuh"

namespace plait::cuda::mma {

// Called by the whole block, which no longer uses `storage`; it does again until the next barrier.
template <class T, catalog::DecodeTile kTile, class Note>
__device__ __forceinline__ void attend_segment(const DecodeParams& params, DecodeStorage<T, kTile>& storage,
                                               const DecodeSegment& segment, const Note& note) {
  using Loop = DecodeMainloop<T, kTile>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  typename Loop::Output out;
  SoftmaxRows<Loop::kRows> rows;
  Loop{params, storage, warp, lane}.run(segment, note, out, rows);
  const Combine<T, kTile> combine{params, storage, warp, lane};
  combine.finish(storage.segment, storage.part, out, rows);
  ptx::wait_for_grid();  // the counters are zero
  combine.arrive(storage.segment, storage.part);
}

// kSize, kGpu: which of the bucket's tiles.
template <class T, int kHeadDim, int kSize, int kGpu>
__global__ void __launch_bounds__(catalog::decode_tiles(kHeadDim)[kSize][kGpu].threads(),
                                  catalog::decode_tiles(kHeadDim)[kSize][kGpu].most_blocks_per_multiprocessor)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  constexpr catalog::DecodeTile kTile = catalog::decode_tiles(kHeadDim)[kSize][kGpu];
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<DecodeStorage<T, kTile>*>(shared);
  const DecodeSchedule schedule{params, kTile.step_keys};
  const bool fixed = params.split_keys > 0;
  Shares shares = params.shares;
  unsigned step = 0, end = 0;
  const auto deal = [&] {
    step = fixed ? blockIdx.x : shares.begin(blockIdx.x);
    end = fixed ? shares.steps : shares.begin(blockIdx.x + 1);
  };
  if (params.ragged) {
    ptx::wait_for_grid();  // new keys and turned queries
  } else {
    deal();
  }
  bool counted = !params.ragged;
#pragma unroll 1
  while (true) {
    const StepPlace at = schedule.find(counted ? step : kAllSteps);
    if (!counted) {
      shares = Shares::of(at.unit_begin, gridDim.x, fixed ? 1 : kFewestSteps);
      if (blockIdx.x >= shares.workers) return;
      deal();
      counted = true;
      continue;
    }
    const unsigned upto = fixed ? step + gridDim.x : min(end, at.unit_begin + at.keys.steps);
    if (threadIdx.x == kTile.threads() - 1) storage.place = at, storage.shares = shares;
    const DecodeSegment segment = fixed ? schedule.split(at, step) : schedule.share(at, step, upto);
    attend_segment<T, kTile>(params, storage, segment, [&params, &storage, &segment, step] {
      if (threadIdx.x != kTile.threads() - 1) return;
      const DecodeSchedule of{params, kTile.step_keys};
      storage.segment = segment;
      storage.part = params.split_keys > 0 ? of.split_part(storage.place, step)
                                           : of.share_part(storage.place, storage.shares, blockIdx.x);
    });
    step = upto;
    if (step >= end) return;
    __syncthreads();
  }
}

}  // namespace plait::cuda::mma
