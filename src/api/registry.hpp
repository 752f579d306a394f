// The backends of this build.
// Called by every file of api/.
#pragma once

#include "core/registry.hpp"

namespace plait::api {

Registry registry();

// Throws unless `plan` was made for the problem with this fingerprint and its workspace is there.
void check_plan(const Plan& plan, uint64_t fingerprint, const void* workspace);

}  // namespace plait::api
