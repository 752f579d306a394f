// Scalar float16 and bfloat16 to and from float, rounded to nearest even.
// Called by cpu/merge.cpp; the SIMD kernels convert whole vectors themselves.
#pragma once

#include <bit>
#include <cstdint>

namespace plait {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero and subnormals: multiples of 2^-24
    const float scaled = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(scaled));
  }
  const uint32_t exponent_shift = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;  // infinities and NaNs stay so
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent_shift));
}
inline float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
inline float to_float(float value) { return value; }
inline double to_float(double value) { return value; }

inline void from_float(float value, Float16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t rounded = 0;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    rounded = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 makes the last mantissa bit worth 2^-24, so the addition rounds.
    rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | rounded);
}
inline void from_float(float value, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
inline void from_float(float value, float& out) { out = value; }
inline void from_float(double value, double& out) { out = value; }

}  // namespace plait
