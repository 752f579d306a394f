// The version of the library that is loaded.
// Called by `plait --version` and the Python package.
#pragma once

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

const char* version();  // "0.1.0"

}  // namespace plait
#pragma GCC visibility pop
