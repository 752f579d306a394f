// The version string, from the build.
// Called by users and by the CLI.
#include "plait/version.hpp"

namespace plait {

const char* version() { return PLAIT_VERSION; }

}  // namespace plait
