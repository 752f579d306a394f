// Number formats by hand, so that the CLI needs no half-precision type of the compiler.
// Called through tensors.hpp.
#include "tensors.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "plait/error.hpp"

namespace plait::cli {
namespace {

constexpr std::align_val_t kAlign{64};

// A 16-bit binary format: significand bits with the hidden one, exponent (of frexp) of the smallest normal number.
struct Format {
  int bits, min_exponent;
  double largest;
};
constexpr Format kHalf{11, -13, 65504.0};
constexpr Format kBrain{8, -125, 3.3895313892515355e38};

double round_to_format(const Format& format, double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  std::frexp(value, &exponent);
  const int quantum = std::max(exponent, format.min_exponent) - format.bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
  return std::abs(rounded) > format.largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

uint16_t encode_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(size, &exponent);
  if (size == 0 || exponent < kHalf.min_exponent) {  // zero or subnormal: multiples of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(size, 24)));
  }
  const auto significand = static_cast<uint16_t>(std::ldexp(size, kHalf.bits - exponent));  // 1024 .. 2047
  return static_cast<uint16_t>(sign | ((exponent - kHalf.min_exponent + 1) << 10) | (significand & 0x3ff));
}

double decode_half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  double size = 0;
  if (exponent == 31) {
    size = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  }
  return bits & 0x8000 ? -size : size;
}

double load(const TensorView& view, int64_t index) {
  switch (view.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(view.data)[index];
    case DType::kFloat32:
      return static_cast<const float*>(view.data)[index];
    case DType::kFloat16:
      return decode_half(static_cast<const uint16_t*>(view.data)[index]);
    case DType::kBFloat16:
      return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(view.data)[index]} << 16);
    default:
      return static_cast<const int32_t*>(view.data)[index];
  }
}

void store(const TensorView& view, int64_t index, double value) {
  const double rounded = round_to(view.dtype, value);
  switch (view.dtype) {
    case DType::kFloat64:
      static_cast<double*>(view.data)[index] = rounded;
      break;
    case DType::kFloat32:
      static_cast<float*>(view.data)[index] = static_cast<float>(rounded);
      break;
    case DType::kFloat16:
      static_cast<uint16_t*>(view.data)[index] = encode_half(rounded);
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(view.data)[index] =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(rounded)) >> 16);
      break;
    default:
      static_cast<int32_t*>(view.data)[index] = static_cast<int32_t>(value);
  }
}

}  // namespace

Buffer::Buffer(int64_t bytes) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  data_.reset(::operator new(size, kAlign));
  std::memset(data_.get(), 0, size);
}

void Buffer::Free::operator()(void* data) const { ::operator delete(data, kAlign); }

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16:
      return round_to_format(kHalf, value);
    case DType::kBFloat16:
      return round_to_format(kBrain, value);
    case DType::kFloat32:
      return static_cast<double>(static_cast<float>(value));
    default:
      return value;
  }
}

double roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return std::ldexp(1.0, -kHalf.bits);
    case DType::kBFloat16:
      return std::ldexp(1.0, -kBrain.bits);
    case DType::kFloat32:
      return std::ldexp(1.0, -std::numeric_limits<float>::digits);
    default:
      return std::ldexp(1.0, -std::numeric_limits<double>::digits);
  }
}

Tensor make_tensor(const Problem& problem, Slot slot, DType dtype) {
  Tensor tensor;
  tensor.view = problem.view(slot, nullptr, dtype);
  tensor.buffer = Buffer(tensor.view.numel() * dtype_bytes(dtype));
  tensor.view.data = tensor.buffer.data();
  return tensor;
}

void fill_normal(Tensor& tensor, std::mt19937_64& random, double factor) {
  std::normal_distribution<double> normal;
  const int64_t count = tensor.view.numel();
  for (int64_t i = 0; i < count; ++i) store(tensor.view, i, factor * normal(random));
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<size_t>(tensor.view.numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = load(tensor.view, static_cast<int64_t>(i));
  return values;
}

void set_values(Tensor& tensor, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) store(tensor.view, static_cast<int64_t>(i), values[i]);
}

Tensor converted(const Tensor& tensor, DType dtype) {
  if (tensor.view.data == nullptr) return {};
  Tensor copy;
  copy.view = tensor.view;
  copy.view.dtype = dtype;
  copy.buffer = Buffer(copy.view.numel() * dtype_bytes(dtype));
  copy.view.data = copy.buffer.data();
  set_values(copy, values_of(tensor));
  return copy;
}

void require_memory(double bytes) {
  const double have = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  constexpr double kUsable = 0.8, kGib = 1024.0 * 1024.0 * 1024.0;
  if (bytes > kUsable * have) {
    throw Error(ErrorCode::kInvalidArgument, "shape",
                fmt::format("the tensors need about {:.1f} GiB and this machine has {:.1f} GiB; use smaller sizes",
                            bytes / kGib, have / kGib));
  }
}

}  // namespace plait::cli
