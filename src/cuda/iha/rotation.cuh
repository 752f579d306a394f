// Rotation: angles from tables to shared memory and registers, and pairs turned in fp32, of mma accumulators or of
// packed operands.
// Called by the expand and contract kernels.
#pragma once

#include "cuda/iha/tokens.cuh"

namespace plait::cuda::iha {

// Starts the copy of a token's angles to shared memory, [rows][cos, sin][pairs] fp32 from pair `first_pair` on, with
// 4 * 2^quads_log2 numbers per row; (1, 0) where nothing turns. Called by whole warps.
__device__ inline void fetch_angles(const RotaryTables& r, float* table, int rows, int quads_log2, int first_pair,
                                    int64_t position, int lane) {
  const int quads = 1 << quads_log2, half = quads / 2;
  for (int i = lane; i < rows << quads_log2; i += 32) {
    const int row = i >> quads_log2, quad = i & (quads - 1);
    const bool is_cos = quad < half;
    const int pair = first_pair + (is_cos ? quad : quad - half) * 4;
    const int64_t at = position * rows + row, stride = is_cos ? r.cos_pair_stride : r.sin_pair_stride;
    const float* from = is_cos ? r.cos + at * r.cos_row_stride : r.sin + at * r.sin_row_stride;
    const int left = position >= 0 ? r.dim / 2 - pair : 0;
    if (r.vector && left > 0) {
      ptx::cp_async_16(ptx::shared_address(table + 4 * i), from + pair, true);
      continue;
    }
    float value[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] = e < left ? from[(pair + e) * stride] : is_cos ? 1.0f : 0.0f;
    *reinterpret_cast<float4*>(table + 4 * i) = {value[0], value[1], value[2], value[3]};
  }
}

__device__ __forceinline__ void turn_pair(float& x, float& y, float cos, float sin) {
  const float turned = x * cos - y * sin;
  y = y * cos + x * sin;
  x = turned;
}

// Two packed operand registers. Style half: the lower elements of `x` and `y` are one pair, the upper ones another;
// style pairs: `x` is one pair, `y` another. Pairs at or past `left` do not turn (style half: a matter of both or
// none).
template <class T>
__device__ __forceinline__ void turn_packed(uint32_t& x, uint32_t& y, float cos0, float cos1, float sin0, float sin1,
                                            bool pairs, int left) {
  float2 a = ptx::unpack<T>(x), b = ptx::unpack<T>(y);
  if (!pairs) {
    turn_pair(a.x, b.x, cos0, sin0);
    turn_pair(a.y, b.y, cos1, sin1);
    x = ptx::pack<T>(a.x, a.y), y = ptx::pack<T>(b.x, b.y);
    return;
  }
  turn_pair(a.x, a.y, cos0, sin0);
  turn_pair(b.x, b.y, cos1, sin1);
  if (left > 0) x = ptx::pack<T>(a.x, a.y);
  if (left > 1) y = ptx::pack<T>(b.x, b.y);
}

}  // namespace plait::cuda::iha
