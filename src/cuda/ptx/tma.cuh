// The copy engine: boxes of a tensor described by a tensor map, between global and shared memory.
// Called by the kernels of cuda_sm90, by one thread each.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace plait::ptx {

// Into the descriptor cache, ahead of the first copy. `map`: a __grid_constant__ parameter.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What the thread wrote to or read from shared memory comes before copies, and wgmma, that other threads start behind
// a barrier.
__device__ __forceinline__ void fence_async_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies the map's box at `coordinates` (innermost first; zeros outside the tensor) to `target`, and counts its bytes
// at `barrier`.
__device__ __forceinline__ void tma_load_5d(uint32_t target, const CUtensorMap& map, uint32_t barrier,
                                            const int (&coordinates)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3]),
      "r"(coordinates[4])
      : "memory");
}

// Copies the box at `coordinates` from `source` to the map's tensor; what lies outside of it is left out. What was
// written to `source` has to be behind fence_async_copies().
__device__ __forceinline__ void tma_store_5d(const CUtensorMap& map, uint32_t source, const int (&coordinates)[5]) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(&map),
               "r"(source), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(coordinates[3]),
               "r"(coordinates[4])
               : "memory");
}

// Waits until the stores of this thread have read their sources.
__device__ __forceinline__ void tma_stores_read() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace plait::ptx
