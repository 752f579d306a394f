// Non-owning tensor views: data pointer, dtype, device, shape and strides.
// Called by user code and by every binding to hand tensors to the library.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kOther };

constexpr int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kOther:
      return 0;
  }
  return 0;
}

const char* dtype_name(DType dtype);

enum class DeviceKind : int32_t { kCpu, kCuda, kOther };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int kMaxRank = 5;

// A strided view. Strides are in elements and may be 0 (expanded); `data` may be null only when a dimension is 0.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device{};
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  // A row-major view of `shape` at `data`.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape);

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  std::string shape_string() const;  // "[2, 8, 128, 64]"
};

}  // namespace plait
#pragma GCC visibility pop
