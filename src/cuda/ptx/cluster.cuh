// Thread block clusters: blocks that run at the same time and write each other's shared memory. sm_90 and newer.
// Called by mma/decode/cluster.cuh. Before sm_90 nothing here is called.
#pragma once

#include <cstdint>

#include "cuda/ptx/level.cuh"

namespace plait::ptx {

// All threads of all blocks of the cluster arrive, then wait: all blocks have begun. No write is made visible, other
// than what fence_mbarrier_init() is for.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (kCapability >= 90) {
    __syncwarp();  // both are for whole warps
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (kCapability >= 90) {
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
}

// The place in the shared memory of block `rank` of the cluster that `address` is in one's own.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there = 0;
  if constexpr (kCapability >= 90) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  }
  return there;
}

// Writes to a cluster_address() and counts the bytes at the barrier of the same block: who has waited for them sees
// them.
__device__ __forceinline__ void send_cluster(uint32_t address, const float4& v, uint32_t barrier) {
  if constexpr (kCapability >= 90) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
        : "memory");
  }
}
__device__ __forceinline__ void send_cluster(uint32_t address, const float2& v, uint32_t barrier) {
  if constexpr (kCapability >= 90) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address),
                 "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
  }
}

}  // namespace plait::ptx
