// Named barriers: for warps of different roles, which wait at different places of the code.
// Called by the kernels of cuda_mma.
#pragma once

#include "cuda/ptx/level.cuh"

namespace plait::ptx {

// Waits until kThreads threads, whole warps, have come to barrier kId (1 to 15; 0 is that of __syncthreads). What
// they wrote before is visible to all behind it. Not the aligned form, bar.sync: that one expects all at one place of
// the code, or so compute-sanitizer's synccheck holds.
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier() {
  if constexpr (kCapability < 80) {  // the other one takes ptxas a register more there
    asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
  } else {
    asm volatile("barrier.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
  }
}

}  // namespace plait::ptx
