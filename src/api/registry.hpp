// The backends of this build.
// Called by attention.cpp, iha.cpp, kv_cache.cpp and merge.cpp.
#pragma once

#include "core/registry.hpp"

namespace plait::api {

Registry registry();

// Throws unless `plan` was made for the problem with this fingerprint, and its workspace and an executor are there.
void check_plan(const Plan& plan, uint64_t fingerprint, const void* workspace, const Executor& executor);
void check_executor(const Executor& executor, DeviceKind device);

}  // namespace plait::api
