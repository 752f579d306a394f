// Memory of test tensors: any strides, random values, NaN in every element not set.
// Called by problem_builder.hpp and by the tests of every backend.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/problem.hpp"
#include "reference/access.hpp"

namespace plait::testing {

enum class Strides {
  kBhsd,    // contiguous in canonical order
  kBshd,    // contiguous [batch, seqlen, heads, pseudo, dim]
  kRandom,  // each tensor its own order of dimensions, with gaps (NaN) between them
};

using Shape = std::array<int64_t, 5>;  // batch, heads, seqlen, pseudo, dim

inline int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

template <class Function>
void for_each_index(const Shape& s, Function function) {
  for (int64_t b = 0; b < s[0]; ++b)
    for (int64_t h = 0; h < s[1]; ++h)
      for (int64_t n = 0; n < s[2]; ++n)
        for (int64_t p = 0; p < s[3]; ++p)
          for (int64_t d = 0; d < s[4]; ++d) function(reference::Index{b, h, n, p, d});
}

// All elements in canonical order; and back.
inline std::vector<double> values(const CanonicalTensor& tensor, const Shape& shape) {
  std::vector<double> all;
  for_each_index(shape, [&](const reference::Index& i) { all.push_back(reference::load(tensor, i)); });
  return all;
}
inline void assign(const CanonicalTensor& tensor, const Shape& shape, const std::vector<double>& all) {
  size_t next = 0;
  for_each_index(shape, [&](const reference::Index& i) { reference::store(tensor, i, all.at(next++)); });
}

// Row tensors and small views as canonical tensors, so that everything above serves them too.
inline CanonicalTensor as_canonical(const RowTensor& t) {
  return {t.data, t.dtype, t.batch_stride, t.head_stride, t.row_stride, 0, 0};
}
inline CanonicalTensor as_canonical(const TensorView& t) {  // [i, j, (k)] as seqlen, pseudo, dim
  return {t.data, t.dtype, 0, 0, t.stride[0], t.stride[1], t.rank > 2 ? t.stride[2] : 0};
}
inline Shape shape_of(const TensorView& t) { return {1, 1, t.shape[0], t.shape[1], t.rank > 2 ? t.shape[2] : 1}; }

class Arena {
 public:
  Arena(uint64_t seed, Strides strides) : rng_(seed), strides_(strides) {}

  // A NaN-filled tensor. `expanded` dimensions (bit i: dimension i) get stride 0.
  CanonicalTensor poisoned(DType dtype, const Shape& shape, unsigned expanded = 0) {
    std::array<size_t, 5> order{0, 1, 2, 3, 4};
    if (strides_ == Strides::kBshd) order = {0, 2, 1, 3, 4};
    if (strides_ == Strides::kRandom) std::shuffle(order.begin(), order.end(), rng_);
    std::array<int64_t, 5> stride{};
    int64_t next = 1 + gap(1), last = 0;
    for (size_t at = order.size(); at-- > 0;) {
      const size_t dim = order[at];
      if (shape[dim] == 1 || (expanded >> dim & 1u) != 0) continue;
      stride[dim] = next;
      last += std::max<int64_t>(shape[dim] - 1, 0) * next;
      next = next * std::max<int64_t>(shape[dim], 1) + gap(2);
    }
    const int64_t count = elements(shape) == 0 ? 0 : last + 1;
    return {allocate(dtype, count), dtype, stride[0], stride[1], stride[2], stride[3], stride[4]};
  }

  // Values gain * N(0, 1); positions from `filled` on stay NaN.
  CanonicalTensor random(DType dtype, const Shape& shape, int64_t filled, double gain = 1.0, unsigned expanded = 0) {
    const CanonicalTensor tensor = poisoned(dtype, shape, expanded);
    Shape inside = shape;
    inside[2] = std::min(inside[2], filled);
    for_each_index(inside, [&](const reference::Index& i) { reference::store(tensor, i, gain * normal()); });
    return tensor;
  }

  // [rows...] with rank 2 (k = 0) or 3, filled or poisoned.
  TensorView view(DType dtype, int64_t i, int64_t j, int64_t k, bool filled) {
    const Shape shape{1, 1, i, j, std::max<int64_t>(k, 1)};
    const CanonicalTensor t = filled ? random(dtype, shape, i) : poisoned(dtype, shape);
    TensorView v;
    v.data = t.data, v.dtype = dtype, v.rank = k > 0 ? 3 : 2;
    v.shape = {i, j, k}, v.stride = {t.seq_stride, t.pseudo_stride, k > 0 ? t.dim_stride : 0};
    return v;
  }

  RowTensor rows(DType dtype, int64_t batch, int64_t heads, int64_t row_count, int64_t filled) {
    const CanonicalTensor t = random(dtype, {batch, heads, row_count, 1, 1}, filled);
    return {t.data, t.dtype, t.batch_stride, t.head_stride, t.seq_stride};
  }

  // [0, lens[0], lens[0] + lens[1], ...]
  const int32_t* cumulative(const std::vector<int32_t>& lens) {
    auto* at = static_cast<int32_t*>(allocate(DType::kInt32, static_cast<int64_t>(lens.size()) + 1));
    at[0] = 0;
    for (size_t i = 0; i < lens.size(); ++i) at[i + 1] = at[i] + lens[i];
    return at;
  }

  // Elements of the buffer at `data` that are no longer NaN: equals the tensor's size when a call wrote every
  // element and nothing beside them.
  int64_t written(const void* data) const {
    const Block& block = blocks_.at(data);
    int64_t count = 0;
    for (int64_t i = 0; i < block.count; ++i) count += std::isnan(reference::load(data, block.dtype, i)) ? 0 : 1;
    return count;
  }

  double normal() { return normal_(rng_); }
  int64_t below(int64_t bound) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(bound)); }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> bytes;
    DType dtype;
    int64_t count;
  };

  int64_t gap(int64_t most) { return strides_ == Strides::kRandom ? below(most + 1) : 0; }

  void* allocate(DType dtype, int64_t count) {
    auto bytes = std::make_unique<std::byte[]>(static_cast<size_t>(count * dtype_bytes(dtype)));
    void* data = bytes.get();
    for (int64_t i = 0; i < count && dtype != DType::kInt32; ++i) reference::store(data, dtype, i, std::nan(""));
    blocks_.emplace(data, Block{std::move(bytes), dtype, count});
    return data;
  }

  std::mt19937_64 rng_;
  std::normal_distribution<double> normal_;
  Strides strides_;
  std::map<const void*, Block> blocks_;
};

}  // namespace plait::testing
