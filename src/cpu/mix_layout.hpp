// Premix and collapse as one operation, rows mixed by a weight matrix at every position, and its workspace.
// Called by plan.cpp (base null: bytes only) and by iha.cpp.
#pragma once

#include "cpu/tiles.hpp"

namespace plait::cpu {

// y[n, g * out + o, :] = sum_i w[g * out + o, i] x[n, g * in + i, :] for g in [0, groups).
// Premix: in = heads, out = heads * P. Collapse: in = heads * P, out = heads; per head, heads groups of in = P, out
// = 1. Row r of x is (head, pseudo) = (r / x_pseudo, r % x_pseudo), of y likewise; w is the weight tensor read
// row-major.
struct MixShape {
  int64_t batch, seqlen, dim, groups, in, out, x_pseudo, y_pseudo;

  static MixShape of(const PremixProblem& p) {
    return {p.packed ? 1 : p.batch, p.seqlen, p.head_dim, 1, p.heads, p.heads * p.pseudo_heads, 1, p.pseudo_heads};
  }
  static MixShape of(const CollapseProblem& p) {
    const int64_t pairs = p.heads * p.pseudo_heads;
    if (p.global) return {p.batch, p.seqlen, p.head_dim, 1, pairs, p.heads, p.pseudo_heads, 1};
    return {p.batch, p.seqlen, p.head_dim, p.heads, p.pseudo_heads, 1, p.pseudo_heads, 1};
  }

  // A block is a run of positions of one batch entry, side by side in the columns of one product.
  int64_t block_positions() const { return std::max<int64_t>(1, 256 / padded(dim)); }
  int64_t columns() const { return block_positions() * padded(dim); }
  int64_t blocks_per_batch() const { return ceil_div(seqlen, block_positions()); }
  int64_t blocks() const { return batch * blocks_per_batch(); }
  // Partial sums of the weight gradient; from the problem alone, since it sets the order of summation.
  int64_t partials() const { return std::min<int64_t>(64, blocks()); }
};

struct MixLayout {
  float* weights;   // [groups * out, in]
  float* partials;  // backward: [partials, groups * out, padded(in)]
  struct Scratch {
    float *x, *y, *x_columns;  // [groups * in, stride], [groups * out, stride]; backward: [columns, padded(in)]
  };
  int64_t stride, scratch_bytes, total_bytes;
  char* scratch;

  MixLayout(const MixShape& shape, bool backward, int32_t workers, void* base) : stride(row_stride(shape.columns())) {
    Carver carver(base);
    weights = carver.take<float>(shape.groups * shape.out * shape.in);
    partials = carver.take<float>(backward ? shape.partials() * shape.groups * shape.out * padded(shape.in) : 0);
    Carver one(nullptr);
    carve(one, shape, backward);
    scratch_bytes = one.bytes();
    scratch = carver.take<char>(scratch_bytes * workers);
    total_bytes = carver.bytes();
  }

  Scratch worker(const MixShape& shape, bool backward, int32_t index) const {
    Carver carver(scratch + index * scratch_bytes);
    return carve(carver, shape, backward);
  }

 private:
  Scratch carve(Carver& carver, const MixShape& shape, bool backward) const {
    Scratch s;
    s.x = carver.take<float>(shape.groups * shape.in * stride);
    s.y = carver.take<float>(shape.groups * shape.out * stride);
    s.x_columns = carver.take<float>(backward ? shape.columns() * padded(shape.in) : 0);
    return s;
  }
};

}  // namespace plait::cpu
