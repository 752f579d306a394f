// The register-blocked fp32 matrix product that every op of the backend runs on.
// Included by the attention and iha translation units, once per Highway target.
#if defined(PLAIT_CPU_MICROKERNEL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PLAIT_CPU_MICROKERNEL_INL_H
#undef PLAIT_CPU_MICROKERNEL_INL_H
#else
#define PLAIT_CPU_MICROKERNEL_INL_H
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using Vec = hn::Vec<F32>;
inline constexpr int64_t kVectorLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

// A of a product: element (row, k) at data[row * row_stride + k * k_stride]. Read by broadcast, so any strides do.
struct Left {
  const float* data;
  int64_t row_stride, k_stride;
  Left from(int64_t row) const { return {data + row * row_stride, row_stride, k_stride}; }
};

// B or C: row-major, rows 64-byte aligned, columns padded to a multiple of kColumnPad.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
};

enum class Update {
  kStore,     // C = A B
  kAdd,       // C = C + A B
  kScaleAdd,  // C = C * factor[column] + A B
};

// Registers of the block: 6 x 4 accumulators, 4 of B and 1 of A where there are 32 vector registers, 6 x 2 where 16.
inline constexpr int kBlockRows = 6;
#if HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM
inline constexpr int kBlockVectors = 4;
#else
inline constexpr int kBlockVectors = 2;
#endif

template <int kRows, int kVectors>
HWY_INLINE void multiply_block(const Left a, const float* HWY_RESTRICT b, int64_t b_stride, float* HWY_RESTRICT c,
                               int64_t c_stride, int64_t depth, Update update, const float* HWY_RESTRICT factor) {
  const F32 d;
  Vec sum[kRows][kVectors];
  int64_t row_offset[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row_offset[r] = r * a.row_stride;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(d);
  }
  const float* HWY_RESTRICT left = a.data;
  for (int64_t k = 0; k < depth; ++k, left += a.k_stride, b += b_stride) {
    Vec right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + v * kVectorLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec broadcast = hn::Set(d, left[row_offset[r]]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(broadcast, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* HWY_RESTRICT at = c + r * c_stride + v * kVectorLanes;
      Vec value = sum[r][v];
      if (update == Update::kAdd) value = hn::Add(hn::Load(d, at), value);
      if (update == Update::kScaleAdd)
        value = hn::MulAdd(hn::Load(d, at), hn::Load(d, factor + v * kVectorLanes), value);
      hn::Store(value, d, at);
    }
  }
}

// One panel of kVectors vectors, all rows.
template <int kVectors>
inline void multiply_panel(int64_t rows, int64_t depth, Left a, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, Update update, const float* factor) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) {
    multiply_block<kBlockRows, kVectors>(a.from(row), b, b_stride, c + row * c_stride, c_stride, depth, update, factor);
  }
  float* rest = c + row * c_stride;
  a = a.from(row);
  switch (rows - row) {
    case 5:
      return multiply_block<5, kVectors>(a, b, b_stride, rest, c_stride, depth, update, factor);
    case 4:
      return multiply_block<4, kVectors>(a, b, b_stride, rest, c_stride, depth, update, factor);
    case 3:
      return multiply_block<3, kVectors>(a, b, b_stride, rest, c_stride, depth, update, factor);
    case 2:
      return multiply_block<2, kVectors>(a, b, b_stride, rest, c_stride, depth, update, factor);
    case 1:
      return multiply_block<1, kVectors>(a, b, b_stride, rest, c_stride, depth, update, factor);
  }
}

// Longest run of k that is summed in one accumulator: 1024 terms in a row would cost fp32 twice the rounding error.
inline constexpr int64_t kDepthSlice = 256;

// C [rows, columns] (op) A [rows, depth] * B [depth, columns]. `columns` is a multiple of kColumnPad; columns of C past
// the caller's own are scratch. `factor` [columns] only with kScaleAdd. The order of every sum is fixed.
inline void multiply(int64_t rows, int64_t columns, int64_t depth, Left a, Rows<const float> b, Rows<float> c,
                     Update update, const float* factor = nullptr) {
  if (factor == nullptr) factor = c.data;  // not read
  for (;;) {
    const int64_t slice = depth < kDepthSlice ? depth : kDepthSlice;
    int64_t column = 0;
    const auto panel = [&](auto vectors) {
      multiply_panel<vectors()>(rows, slice, a, b.data + column, b.stride, c.data + column, c.stride, update,
                                factor + column);
      column += vectors() * kVectorLanes;
    };
    while (column + kBlockVectors * kVectorLanes <= columns) panel(std::integral_constant<int, kBlockVectors>());
    if constexpr (kVectorLanes == 16) {  // otherwise a panel divides kColumnPad
      if (column + 32 <= columns) panel(std::integral_constant<int, 2>());
      if (column < columns) panel(std::integral_constant<int, 1>());
    }
    depth -= slice;
    if (depth == 0) return;
    a.data += slice * a.k_stride;
    b.data += slice * b.stride;
    update = Update::kAdd;
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PLAIT_CPU_MICROKERNEL_INL_H
