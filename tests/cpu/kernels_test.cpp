// The SIMD building blocks on every instruction set: matrix product, exp2, conversions of the 16-bit formats.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels_test.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {

void multiply_for_test(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_step, int64_t k_step,
                       const float* b, float* c, int64_t stride, int update, const float* factor) {
  multiply(rows, columns, depth, {a, row_step, k_step}, {b, stride}, {c, stride}, static_cast<Update>(update), factor);
}

void exp2_for_test(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kVectorLanes) hn::Store(exp2_lanes<true>(hn::Load(F32(), x + i)), F32(), y + i);
}

bool load_for_test(const CanonicalTensor& t, int64_t dim, float* to) { return load_row(t, 0, dim, to); }
void store_for_test(const CanonicalTensor& t, int64_t dim, const float* from) { store_row(t, 0, dim, from, 1.0f); }

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <bit>
#include <random>

#include "cpu/run.hpp"

namespace plait::cpu {
HWY_EXPORT(multiply_for_test);
HWY_EXPORT(exp2_for_test);
HWY_EXPORT(load_for_test);
HWY_EXPORT(store_for_test);

namespace {

using testing::ChosenTarget;
using testing::targets;

struct alignas(64) Line {
  float values[16];
};
float* floats(std::vector<Line>& lines) { return lines.data()->values; }

TEST(CpuKernels, MultiplyMatchesDouble) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> value(-1, 1);
  for (const int64_t target : targets()) {
    const ChosenTarget chosen(target);
    for (int64_t rows = 1; rows <= 13; ++rows) {
      for (const int64_t columns : {16, 32, 48, 64, 80, 112}) {
        for (const int64_t depth : {0, 1, 9}) {
          for (int update = 0; update < 3; ++update) {
            const int64_t stride = columns + 16;
            std::vector<float> a(static_cast<size_t>(rows * depth + 1));
            std::vector<Line> b_lines(static_cast<size_t>((depth + 1) * stride / 16)), factor_lines(8),
                c_lines(static_cast<size_t>(rows * stride / 16));
            for (float& x : a) x = value(rng);
            for (std::vector<Line>* lines : {&b_lines, &c_lines, &factor_lines}) {
              for (Line& line : *lines) {
                for (float& x : line.values) x = value(rng);
              }
            }
            const std::vector<Line> before = c_lines;
            const float *b = floats(b_lines), *factor = floats(factor_lines);
            const bool by_columns = rng() % 2 == 0;
            const int64_t row_step = by_columns ? 1 : depth, k_step = by_columns ? rows : 1;
            HWY_DYNAMIC_DISPATCH(multiply_for_test)
            (rows, columns, depth, a.data(), row_step, k_step, b, floats(c_lines), stride, update, factor);
            for (int64_t r = 0; r < rows; ++r) {
              for (int64_t c = 0; c < stride; ++c) {
                const float old = before.data()->values[r * stride + c];
                double expected = update == 0 ? 0.0 : update == 1 ? old : double{old} * factor[c % columns];
                for (int64_t k = 0; k < depth; ++k) {
                  expected += double{a[static_cast<size_t>(r * row_step + k * k_step)]} * b[k * stride + c];
                }
                if (c >= columns) expected = old;  // untouched
                ASSERT_NEAR(floats(c_lines)[r * stride + c], expected, 2e-6)
                    << hwy::TargetName(target) << " " << rows << " x " << columns << " x " << depth;
              }
            }
          }
        }
      }
    }
  }
}

TEST(CpuKernels, Exp2Within2Ulp) {
  constexpr float kInf = HUGE_VALF;
  for (const int64_t target : targets()) {
    const ChosenTarget chosen(target);
    std::vector<Line> x(4096), y(4096);
    const int64_t count = 65536;
    double worst = 0;
    for (const float width : {1.0f, 20.0f, 126.0f, 249.0f}) {
      for (int64_t i = 0; i < count; ++i) {
        floats(x)[i] =
            width == 249.0f ? -122.0f + width * static_cast<float>(i) / count : -width * static_cast<float>(i) / count;
      }
      HWY_DYNAMIC_DISPATCH(exp2_for_test)(floats(x), floats(y), count);
      for (int64_t i = 0; i < count; ++i) {
        const double exact = std::exp2(double{floats(x)[i]});
        const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
        worst = std::max(worst, std::abs(floats(y)[i] - exact) / ulp);
      }
    }
    EXPECT_LE(worst, (target & (HWY_SSE4 | HWY_SCALAR | HWY_EMU128 | 1LL << 14)) != 0 ? 2.5 : 2.0)
        << hwy::TargetName(target);
    const float special[16] = {0.0f,     -kInf,   kInf,   128.0f, -126.0f, -126.01f,
                               -1000.0f, 1000.0f, NAN,    -NAN,   1.0f,    std::bit_cast<float>(0x7fffffff),
                               127.0f,   -125.5f, -1e30f, 1e30f};
    std::copy_n(special, 16, floats(x));
    HWY_DYNAMIC_DISPATCH(exp2_for_test)(floats(x), floats(y), 16);
    const float* got = floats(y);
    EXPECT_EQ(got[0], 1.0f);
    for (const int zero : {1, 5, 6, 14}) EXPECT_EQ(got[zero], 0.0f) << special[zero];
    for (const int infinite : {2, 3, 7, 15}) EXPECT_EQ(got[infinite], kInf) << special[infinite];
    EXPECT_EQ(got[4], 0x1p-126f);
    for (const int nan : {8, 9, 11}) EXPECT_TRUE(std::isnan(got[nan]));
    EXPECT_EQ(got[10], 2.0f);
    EXPECT_EQ(got[12], 0x1p127f);
  }
}

TEST(CpuKernels, SixteenBitFormatsRoundTripAndRoundToNearestEven) {
  for (const int64_t target : targets()) {
    const ChosenTarget chosen(target);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      constexpr int64_t kCount = 65536;
      std::vector<uint16_t> bits(kCount), back(kCount);
      for (int64_t i = 0; i < kCount; ++i) bits[static_cast<size_t>(i)] = static_cast<uint16_t>(i);
      std::vector<Line> lines(kCount / 16);
      HWY_DYNAMIC_DISPATCH(load_for_test)({bits.data(), dtype, 0, 0, 0, 0, 1}, kCount, floats(lines));
      HWY_DYNAMIC_DISPATCH(store_for_test)({back.data(), dtype, 0, 0, 0, 0, 1}, kCount, floats(lines));
      for (int64_t i = 0; i < kCount; ++i) {
        const double exact = reference::load(bits.data(), dtype, i), got = floats(lines)[i];
        if (std::isnan(exact)) {
          ASSERT_TRUE(std::isnan(got) && std::isnan(reference::load(back.data(), dtype, i))) << i;
          continue;
        }
        ASSERT_EQ(got, exact) << hwy::TargetName(target) << " " << i;
        ASSERT_EQ(back[static_cast<size_t>(i)], bits[static_cast<size_t>(i)]);
      }
      std::mt19937 rng(3);
      for (int round = 0; round < 8; ++round) {
        for (int64_t i = 0; i < kCount; ++i) {
          const auto random = static_cast<uint32_t>(rng());
          // Any bits; halfway cases of both formats; values around the limits of fp16.
          const uint32_t shape[4] = {random, (random & 0xffff0000u) | 0x8000u, (random & 0xffffe000u) | 0x1000u,
                                     0x33000000u + (random & 0x15ffffffu)};
          floats(lines)[i] = std::bit_cast<float>(shape[round % 4]);
        }
        HWY_DYNAMIC_DISPATCH(store_for_test)({back.data(), dtype, 0, 0, 0, 0, 1}, kCount, floats(lines));
        for (int64_t i = 0; i < kCount; ++i) {
          const float exact = floats(lines)[i];
          const uint16_t got = back[static_cast<size_t>(i)];
          if (std::isnan(exact)) {
            ASSERT_TRUE(std::isnan(reference::load(back.data(), dtype, i)))
                << hwy::TargetName(target) << std::hex << " " << std::bit_cast<uint32_t>(exact) << " gives " << got;
            continue;
          }
          ASSERT_EQ(got,
                    dtype == DType::kFloat16 ? reference::encode_float16(exact) : reference::encode_bfloat16(exact))
              << hwy::TargetName(target) << " " << exact;
        }
      }
    }
  }
}

TEST(CpuKernels, LoadReportsWhatIsNotFinite) {
  std::vector<float> row(40, 1.0f);
  std::vector<Line> to(3);
  const CanonicalTensor t{row.data(), DType::kFloat32, 0, 0, 0, 0, 1};
  EXPECT_TRUE(HWY_DYNAMIC_DISPATCH(load_for_test)(t, 37, floats(to)));
  for (int64_t i = 37; i < 48; ++i) EXPECT_EQ(floats(to)[i], 0.0f);
  row[38] = NAN;
  EXPECT_TRUE(HWY_DYNAMIC_DISPATCH(load_for_test)(t, 37, floats(to)));
  for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
    row[36] = bad;
    EXPECT_FALSE(HWY_DYNAMIC_DISPATCH(load_for_test)(t, 37, floats(to)));
  }
}

}  // namespace
}  // namespace plait::cpu
#endif
