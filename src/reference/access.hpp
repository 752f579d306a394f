// Element access for the oracle: any dtype to and from float64, rounded once, to nearest even.
// Called by reference/*.cpp and by the tests of every backend; shares no code with the kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/problem.hpp"

namespace plait::reference {

// `value` rounded to a binary format of `digits` significant bits, steps of at least 2^min_step (subnormals), and
// infinity beyond `largest`.
inline double round_to_format(double value, int digits, int min_step, double largest) {
  if (!std::isfinite(value) || value == 0.0) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int step = std::max(exponent - digits, min_step);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
  return std::abs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

inline uint16_t encode_float16(double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00u);
  const double magnitude = std::abs(round_to_format(value, 11, -24, 65504.0));
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14) return static_cast<uint16_t>(sign | static_cast<uint32_t>(magnitude * 0x1p24));
  int exponent = 0;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  const auto mantissa = static_cast<uint32_t>(fraction * 2048.0) - 1024u;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + 14) << 10 | mantissa);
}

inline double decode_float16(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f, mantissa = bits & 0x3ff;
  double magnitude = std::ldexp(mantissa + (exponent == 0 ? 0 : 1024), std::max(exponent, 1) - 25);
  if (exponent == 31) magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

inline uint16_t encode_bfloat16(double value) {
  const double rounded = round_to_format(value, 8, -133, 0x1.FEp127);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(rounded)) >> 16);
}

inline double decode_bfloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline double load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return decode_float16(static_cast<const uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return decode_bfloat16(static_cast<const uint16_t*>(data)[index]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    case DType::kInt32:
    case DType::kOther:
      break;
  }
  throw Error(ErrorCode::kInternal, "dtype", "the reference reads float16, bfloat16, float32 and float64 only");
}

inline void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = encode_float16(value);
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = encode_bfloat16(value);
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = value;
      return;
    case DType::kInt32:
    case DType::kOther:
      break;
  }
  throw Error(ErrorCode::kInternal, "dtype", "the reference writes float16, bfloat16, float32 and float64 only");
}

// Where an element of a canonical tensor lies.
struct Index {
  int64_t batch = 0, head = 0, seq = 0, pseudo = 0, dim = 0;
};

inline int64_t offset(const CanonicalTensor& t, const Index& i) {
  return i.batch * t.batch_stride + i.head * t.head_stride + i.seq * t.seq_stride + i.pseudo * t.pseudo_stride +
         i.dim * t.dim_stride;
}
inline double load(const CanonicalTensor& t, const Index& i) { return load(t.data, t.dtype, offset(t, i)); }
inline void store(const CanonicalTensor& t, const Index& i, double value) {
  store(t.data, t.dtype, offset(t, i), value);
}

inline int64_t offset(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
  return batch * t.batch_stride + head * t.head_stride + row * t.row_stride;
}
inline double load(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
  return load(t.data, t.dtype, offset(t, batch, head, row));
}
inline void store(const RowTensor& t, int64_t batch, int64_t head, int64_t row, double value) {
  store(t.data, t.dtype, offset(t, batch, head, row), value);
}

// A tensor view of rank up to 3.
inline int64_t offset(const TensorView& t, int64_t i, int64_t j, int64_t k = 0) {
  return i * t.stride[0] + j * t.stride[1] + (t.rank > 2 ? k * t.stride[2] : 0);
}
inline double load(const TensorView& t, int64_t i, int64_t j, int64_t k = 0) {
  return load(t.data, t.dtype, offset(t, i, j, k));
}
inline void store(const TensorView& t, int64_t i, int64_t j, int64_t k, double value) {
  store(t.data, t.dtype, offset(t, i, j, k), value);
}

// A row-major float64 matrix: what the oracle computes on.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> values;

  Matrix() = default;
  Matrix(int64_t row_count, int64_t col_count)
      : rows(row_count), cols(col_count), values(static_cast<size_t>(row_count * col_count)) {}
  double* row(int64_t r) { return values.data() + r * cols; }
  const double* row(int64_t r) const { return values.data() + r * cols; }
};

inline double dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// y += factor * x
inline void add_scaled(double* y, double factor, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

}  // namespace plait::reference
