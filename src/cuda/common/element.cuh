// One element of any dtype to fp32 and back.
// Included by the kernels of naive and sm90, and by the mixes of this folder.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/problem.hpp"

namespace plait::cuda {

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ inline float load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return to_float(static_cast<const __half*>(data)[index]);
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

__device__ inline void store(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(data)[index] = __float2half_rn(value);
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
      return;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace plait::cuda
