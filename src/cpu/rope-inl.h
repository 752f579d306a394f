// Rotation of fp32 rows by one row of the rotary tables.
// Included by the iha and kv_cache translation units, once per Highway target.
#if defined(PLAIT_CPU_ROPE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PLAIT_CPU_ROPE_INL_H
#undef PLAIT_CPU_ROPE_INL_H
#else
#define PLAIT_CPU_ROPE_INL_H
#endif

#include <cstdint>

#include "catalog/catalog.hpp"
#include "hwy/highway.h"
#include "plait/iha.hpp"

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {

class Rotation {
 public:
  Rotation(RopeStyle style, int64_t rope_dim) : half_(rope_dim / 2), pairs_(style == RopeStyle::kPairs) {}

  // The angles of one table row; direction -1 turns back.
  void load(const TensorView& cos, const TensorView& sin, int64_t table_row, float direction) {
    const float* cos_row = static_cast<const float*>(cos.data) + table_row * cos.stride[0];
    const float* sin_row = static_cast<const float*>(sin.data) + table_row * sin.stride[0];
    for (int64_t i = 0; i < half_; ++i) {
      cos_[i] = cos_row[i * cos.stride[1]];
      sin_[i] = direction * sin_row[i * sin.stride[1]];
    }
  }

  void turn(float* HWY_RESTRICT row) const {
    float* HWY_RESTRICT second = row + (pairs_ ? 1 : half_);
    const int64_t step = pairs_ ? 2 : 1;
    for (int64_t i = 0; i < half_; ++i) {
      const float a = row[i * step], b = second[i * step];
      row[i * step] = a * cos_[i] - b * sin_[i];
      second[i * step] = b * cos_[i] + a * sin_[i];
    }
  }

 private:
  int64_t half_;
  bool pairs_;
  float cos_[catalog::kMaxHeadDim / 2], sin_[catalog::kMaxHeadDim / 2];
};

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PLAIT_CPU_ROPE_INL_H
