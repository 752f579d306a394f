// Registers move between the warpgroups of a block, four warps each.
// Called by the kernels of cuda_sm90, by all threads of a warpgroup. The kernel needs launch bounds.
#pragma once

namespace plait::ptx {

// Gives registers back, down to `registers` (a multiple of 8) per thread.
template <int registers>
__device__ __forceinline__ void release_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Waits for registers that others give back, up to `registers` per thread.
template <int registers>
__device__ __forceinline__ void claim_registers() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace plait::ptx
