// Conversions of the oracle's element access: round trips, ties to even, subnormals, one rounding only.
// Called by ctest.
#include "reference/access.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace plait::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Access, EveryFloat16RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const double value = decode_float16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_EQ(bits & 0x7c00u, 0x7c00u);
      EXPECT_TRUE(std::isnan(decode_float16(encode_float16(value))));
    } else {
      ASSERT_EQ(encode_float16(value), bits) << value;
    }
  }
}

TEST(Access, EveryBfloat16RoundTrips) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const double value = decode_bfloat16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_EQ(bits & 0x7f80u, 0x7f80u);
      EXPECT_TRUE(std::isnan(decode_bfloat16(encode_bfloat16(value))));
    } else {
      ASSERT_EQ(encode_bfloat16(value), bits) << value;
    }
  }
}

// Between two neighbours the nearer one is taken, at the midpoint the even one, on every binade and subnormal step.
template <class Encode, class Decode>
void expect_nearest_even(uint16_t infinity, Encode encode, Decode decode) {
  for (uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const double below = decode(bits), above = decode(static_cast<uint16_t>(bits + 1)), middle = (below + above) / 2;
    const auto next = static_cast<uint16_t>(bits + 1);
    ASSERT_EQ(encode(middle), bits % 2 == 0 ? bits : next);
    ASSERT_EQ(encode(std::nextafter(middle, 0.0)), bits);
    ASSERT_EQ(encode(std::nextafter(middle, kInfinity)), next);
    ASSERT_EQ(encode(-std::nextafter(middle, kInfinity)), next | 0x8000);
  }
}

TEST(Access, Float16RoundsToNearestEven) { expect_nearest_even(0x7c00, encode_float16, decode_float16); }
TEST(Access, Bfloat16RoundsToNearestEven) { expect_nearest_even(0x7f80, encode_bfloat16, decode_bfloat16); }

TEST(Access, KnownFloat16Bits) {
  EXPECT_EQ(encode_float16(1.0), 0x3c00);
  EXPECT_EQ(encode_float16(-2.0), 0xc000);
  EXPECT_EQ(encode_float16(65504.0), 0x7bff);
  EXPECT_EQ(encode_float16(65519.999), 0x7bff);
  EXPECT_EQ(encode_float16(65520.0), 0x7c00);
  EXPECT_EQ(encode_float16(-1e300), 0xfc00);
  EXPECT_EQ(encode_float16(0x1p-14), 0x0400);
  EXPECT_EQ(encode_float16(0x1p-24), 0x0001);
  EXPECT_EQ(encode_float16(0x1p-25), 0x0000);
  EXPECT_EQ(encode_float16(-0.0), 0x8000);
  EXPECT_EQ(encode_float16(1.0 + 0x1p-11 + 0x1p-40), 0x3c01);  // through float32 this would be a tie
}

TEST(Access, KnownBfloat16Bits) {
  EXPECT_EQ(encode_bfloat16(1.0), 0x3f80);
  EXPECT_EQ(encode_bfloat16(-0.5), 0xbf00);
  EXPECT_EQ(encode_bfloat16(3.3895313892515355e38), 0x7f7f);
  EXPECT_EQ(encode_bfloat16(3.4e38), 0x7f80);
  EXPECT_EQ(encode_bfloat16(0x1p-133), 0x0001);
  EXPECT_EQ(encode_bfloat16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);
}

TEST(Access, LoadAndStoreEveryDtype) {
  const double value = 1.0 + 0x1p-7;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    alignas(8) std::byte bytes[32] = {};
    store(bytes, dtype, 1, value);
    EXPECT_EQ(load(bytes, dtype, 1), value);
    EXPECT_EQ(load(bytes, dtype, 0), 0.0);
    EXPECT_EQ(load(bytes, dtype, 2), 0.0);
  }
  int32_t integer = 0;
  EXPECT_THROW(load(&integer, DType::kInt32, 0), Error);
  EXPECT_THROW(store(&integer, DType::kInt32, 0, 1.0), Error);
}

}  // namespace
}  // namespace plait::reference
