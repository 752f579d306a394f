// float16 and bfloat16 conversion: every 16-bit pattern there and back, and rounding at the midpoints.
#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace plait {
namespace {

template <class Half>
void round_trip_every_pattern() {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    Half back{};
    from_float(value, back);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(back))) << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

// The midpoint of two neighbours goes to the even one, a nudge beyond it to the nearer one.
template <class Half>
void rounds_to_nearest_even(uint32_t largest) {
  for (uint32_t bits = 0; bits < largest; ++bits) {
    const double low = to_float(Half{static_cast<uint16_t>(bits)}),
                 high = to_float(Half{static_cast<uint16_t>(bits + 1)});
    const auto middle = static_cast<float>((low + high) / 2);
    Half at{}, below{}, above{};
    from_float(middle, at);
    from_float(std::nextafter(middle, 0.0f), below);
    from_float(std::nextafter(middle, INFINITY), above);
    ASSERT_EQ(at.bits, bits % 2 == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(below.bits, bits);
    ASSERT_EQ(above.bits, bits + 1);
  }
}

TEST(Convert, Float16) {
  round_trip_every_pattern<Float16>();
  rounds_to_nearest_even<Float16>(0x7bffu);
  Float16 half{};
  from_float(65519.0f, half);
  EXPECT_EQ(half.bits, 0x7bffu);
  from_float(65520.0f, half);
  EXPECT_EQ(half.bits, 0x7c00u);
  from_float(-1e30f, half);
  EXPECT_EQ(half.bits, 0xfc00u);
}

TEST(Convert, BFloat16) {
  round_trip_every_pattern<BFloat16>();
  rounds_to_nearest_even<BFloat16>(0x7f7fu);
}

}  // namespace
}  // namespace plait
