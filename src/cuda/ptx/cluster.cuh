// Thread block clusters: blocks that run at the same time and write each other's shared memory. sm_90 and newer.
// Called by the kernels of mma/decode. Before sm_90 all of it does nothing; such kernels are then not launched.
#pragma once

#include <cstdint>

#include "cuda/ptx/level.cuh"

namespace plait::ptx {

// All threads of all blocks of the cluster arrive, then wait. What a thread wrote before it arrived, to its own shared
// memory or another block's, is visible to all that have waited.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kCapability >= 90) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same without that promise.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  if constexpr (kCapability >= 90) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kCapability >= 90) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The place in the shared memory of block `rank` of the cluster that `address` is in one's own.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there = 0;
  if constexpr (kCapability >= 90) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  }
  return there;
}
__device__ __forceinline__ void store_cluster(uint32_t address, const float4& v) {
  if constexpr (kCapability >= 90) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w)
                 : "memory");
  }
}
__device__ __forceinline__ void store_cluster(uint32_t address, const float2& v) {
  if constexpr (kCapability >= 90) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
  }
}

}  // namespace plait::ptx
