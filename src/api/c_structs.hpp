// The structs of the C API as arguments of the C++ one; whatever they hold, a clear error or a legal value.
// Called by c_api.cpp.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <optional>
#include <string>
#include <variant>

#include "plait/kv_cache.hpp"
#include "plait/plait.h"

namespace plait::c_api {

[[noreturn]] inline void invalid(const char* argument, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, argument, message);
}

// A struct as this library knows it, from the caller's `struct_size` bytes: fields the caller does not know are zero.
template <class Params>
Params read(const void* params, const char* argument) {
  if (params == nullptr) invalid(argument, "got null, expected the struct of the op");
  uint32_t size = 0;
  std::memcpy(&size, params, sizeof(size));
  if (size < 2 * sizeof(uint32_t) || size % alignof(Params) != 0) {
    invalid("struct_size", fmt::format("got {} in {}; start from the struct's _INIT macro", size, argument));
  }
  if (size > sizeof(Params)) {
    invalid("struct_size", fmt::format("got {} in {}, this library knows {} bytes; it is older than the header", size,
                                       argument, sizeof(Params)));
  }
  Params known{};
  std::memcpy(&known, params, size);
  return known;
}

// An enum from C, in [0, last].
template <class Enum>
Enum checked(int32_t value, Enum last, const char* argument) {
  if (value < 0 || value > static_cast<int32_t>(last)) {
    invalid(argument, fmt::format("got {}, expected 0 to {}", value, static_cast<int32_t>(last)));
  }
  return static_cast<Enum>(value);
}

bool flag(int32_t value, const char* argument);
TensorView tensor(const plait_tensor* from, const char* name);
std::optional<TensorView> optional_tensor(const plait_tensor* from, const char* name);
AttentionArgs attention_args(const plait_attention& c);
AttentionBackwardArgs backward_args(const plait_attention& c);
PremixArgs premix_args(const plait_premix& c);
CollapseArgs collapse_args(const plait_collapse& c);
std::variant<KvCacheArgs, IhaKvCacheArgs> any_kvcache_args(const plait_kvcache& c);
DeviceInfo device_info(const plait_device* device);
Executor executor_of(const plait_executor* executor);

}  // namespace plait::c_api
