// Programmatic dependent launch: a kernel that starts while the one before it in the stream still runs.
// Called by the kernels of mma/decode and aux/merge_ranges.cu. Before sm_90 both do nothing: launches are then ordered
// by the stream alone.
#pragma once

namespace plait::ptx {

// The next kernel of the stream may start, if it was launched so.
__device__ __forceinline__ void release_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and its writes are visible.
__device__ __forceinline__ void wait_for_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace plait::ptx
