// Named barriers: for warps of different roles, which wait at different places of the code.
// Called by the kernels of cuda_mma.
#pragma once

namespace plait::ptx {

// Waits until `threads` threads, whole warps, have come to barrier `id` (1 to 15; 0 is that of __syncthreads). What
// they wrote before is visible to all behind it. Not the aligned form, bar.sync: that one expects all at one place of
// the code, or so compute-sanitizer's synccheck holds.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace plait::ptx
