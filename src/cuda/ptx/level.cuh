// Which tensor-core instructions a compilation uses: level 75 (Turing) or 80 (Ampere and newer).
// Included by the wrappers of this folder. -DPLAIT_MMA_LEVEL=75 builds Turing's path for a newer GPU, to test it there.
#pragma once

namespace plait::ptx {

// The compute capability (times 10) that device code is compiled for; launch bounds depend on it.
#if defined(__CUDA_ARCH__)
inline constexpr int kCapability = __CUDA_ARCH__ / 10;
#else
inline constexpr int kCapability = 90;
#endif

#if defined(PLAIT_MMA_LEVEL)
inline constexpr int kLevel = PLAIT_MMA_LEVEL;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kLevel = 75;
#else
inline constexpr int kLevel = 80;
#endif
static_assert(kLevel == 75 || kLevel == 80);

}  // namespace plait::ptx
