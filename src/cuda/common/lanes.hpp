// The mask of a vote or shuffle of a whole warp.
// Included by kernels.
#pragma once

namespace plait::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace plait::cuda
