// An aligned workspace for a plan.
// Called by the tests of the public API.
#pragma once

#include <cstdlib>
#include <memory>

#include "plait/plan.hpp"

namespace plait::testing {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Workspace = std::unique_ptr<void, Free>;

inline Workspace workspace_of(const Plan& plan) {
  const int64_t bytes = (plan.workspace_bytes + 63) / 64 * 64;
  return Workspace(bytes > 0 ? std::aligned_alloc(64, static_cast<size_t>(bytes)) : nullptr);
}

}  // namespace plait::testing
