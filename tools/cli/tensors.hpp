// Host tensors of any dtype: allocated, filled at random, read back as double.
// Called by check and bench.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "plait/tensor.hpp"
#include "problem.hpp"

namespace plait::cli {

// Zeroed memory, 64-byte aligned.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  void* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
};

struct Tensor {
  Buffer buffer;
  TensorView view;
};

// The nearest number of `dtype` (ties to even; overflow gives infinity).
double round_to(DType dtype, double value);
// Unit roundoff of `dtype`: the largest relative error of one rounding.
double roundoff(DType dtype);

Tensor make_tensor(const Problem& problem, Slot slot, DType dtype);
void fill_normal(Tensor& tensor, std::mt19937_64& random, double factor);
// All elements in storage order.
std::vector<double> values_of(const Tensor& tensor);
void set_values(Tensor& tensor, const std::vector<double>& values);
// The same numbers in another dtype; nothing for nothing.
Tensor converted(const Tensor& tensor, DType dtype);

// Throws unless this machine's memory holds `bytes`.
void require_memory(double bytes);

}  // namespace plait::cli
