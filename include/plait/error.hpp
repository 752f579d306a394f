// The one exception type of the library and its codes.
// Called by every layer; user code catches plait::Error.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

enum class ErrorCode : int32_t {
  kInvalidArgument = 1,  // a value, shape, dtype or combination that the contract forbids
  kUnsupported = 2,      // legal, but no built backend or the chosen one cannot serve it
  kInternal = 3,         // a bug in this library
  kDevice = 4,           // the GPU or its driver refused a call (CUDA error in the message)
};

// Thrown by every refusal. `argument()` is the name of the offending argument as the public API spells it;
// `what()` says what was got, what is legal, and the way out. Nothing has run or been written when it is thrown.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string argument, const std::string& message)
      : std::runtime_error(argument + ": " + message), code_(code), argument_(std::move(argument)) {}

  ErrorCode code() const noexcept { return code_; }
  const std::string& argument() const noexcept { return argument_; }

 private:
  ErrorCode code_;
  std::string argument_;
};

}  // namespace plait
#pragma GCC visibility pop
