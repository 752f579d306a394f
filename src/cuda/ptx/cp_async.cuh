// cp.async: 16 bytes from global to shared memory without passing through registers (level 75: through registers).
// Called by the loaders of cuda_mma and of iha.
#pragma once

#include <cstdint>

#include "cuda/ptx/level.cuh"

namespace plait::ptx {

// Copies 16 bytes, or writes 16 zero bytes when `inside` is false: `source` is then not read.
__device__ __forceinline__ void cp_async_16(uint32_t target, const void* source, bool inside) {
  if constexpr (kLevel == 75) {
    uint4 value{};
    if (inside) value = *static_cast<const uint4*>(source);
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(target), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(inside ? 16 : 0)
                 : "memory");
  }
}

// The same for 8 bytes.
__device__ __forceinline__ void cp_async_8(uint32_t target, const void* source, bool inside) {
  if constexpr (kLevel == 75) {
    uint2 value{};
    if (inside) value = *static_cast<const uint2*>(source);
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(target), "r"(value.x), "r"(value.y) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(inside ? 8 : 0)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  if constexpr (kLevel >= 80) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of the thread's committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (kLevel >= 80) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace plait::ptx
