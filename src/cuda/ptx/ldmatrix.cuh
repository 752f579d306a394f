// ldmatrix: four 8 x 8 matrices of 16-bit elements from shared memory into operand registers.
// Called by the kernels of mma, sm90 and iha. Lane i gives the 16-byte row i % 8 of matrix i / 8; register m of lane
// l receives elements 2 (l % 4), +1 of row l / 4 of matrix m (`trans`: of column l / 4).
#pragma once

#include <cstdint>

#include "cuda/ptx/level.cuh"

namespace plait::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Whether stmatrix exists: rows of 8 x 8 matrices, as ldmatrix loads them, to shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kStoresMatrices = kLevel >= 80;
#else
inline constexpr bool kStoresMatrices = false;
#endif
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// Transposes an 8 x 8 matrix of 16-bit elements: the lane's register holds row lane / 4, columns 2 (lane % 4) and + 1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

}  // namespace plait::ptx
