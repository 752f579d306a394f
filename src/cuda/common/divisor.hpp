// Division of block numbers by numbers that the host knows. Plain C++.
// Called by the schedules of the kernels.
#pragma once

#include <algorithm>
#include <cstdint>

namespace plait::cuda {

// floor(n / d) for n < 2^31 and d of 1 to 2^31, exact since the multiplier's error, below d / 2^shift, times n stays
// below d.
struct Divisor {
  uint32_t multiplier, shift;

  static constexpr Divisor of(int64_t d) {
    uint32_t log2 = 0;
    while (log2 < 31 && int64_t{1} << log2 < d) ++log2;
    const uint64_t divisor = static_cast<uint64_t>(std::clamp<int64_t>(d, 1, int64_t{1} << 31));
    return {static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor), 31 + log2};
  }
  constexpr unsigned divide(unsigned n) const { return static_cast<unsigned>(uint64_t{n} * multiplier >> shift); }
};

}  // namespace plait::cuda
