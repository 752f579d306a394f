// Premix with RoPE and collapse, forward and backward: one blocked product per run of positions.
// Called by api/ through cpu.hpp.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/iha.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "cpu/rope-inl.h"
#include "cpu/tile_io-inl.h"

#ifndef PLAIT_CPU_IHA_ONCE
#define PLAIT_CPU_IHA_ONCE
#include "cpu/cpu.hpp"
#include "cpu/mix_layout.hpp"

namespace plait::cpu {
namespace {

// A weight tensor of rank 2 or 3 as rows of its last dimension, in row-major order.
struct WeightRows {
  CanonicalTensor tensor;
  int64_t middle, rows, length;
  explicit WeightRows(const TensorView& w)
      : tensor{w.data, w.dtype, 0, 0, 0, 0, w.stride[w.rank - 1]},
        middle(w.rank == 3 ? w.shape[1] : 1),
        rows(w.shape[0] * middle),
        length(w.shape[w.rank - 1]),
        stride0_(w.stride[0]),
        stride1_(w.rank == 3 ? w.stride[1] : 0) {}
  int64_t offset(int64_t row) const { return row / middle * stride0_ + row % middle * stride1_; }

 private:
  int64_t stride0_, stride1_;
};

struct MixContext {
  const MixShape shape;
  const MixLayout layout;
  const CanonicalTensor x, y, dx, dy;
  const TensorView weights, dweights;
  const PremixProblem* premix;  // null: a collapse
  const PremixTensors* rope;    // null: nothing turns
  const int64_t end;            // positions past it (packed tail) read as zero
  TaskQueue blocks;             // forward: blocks; backward: partial sums
  TaskQueue rows;               // backward: rows of the weight gradient

  template <class Tensors>
  MixContext(const MixShape& mix, const Plan& plan, void* workspace, bool backward, const Tensors& t,
             const TensorView& w, const TensorView& dw, const PremixProblem* problem, const PremixTensors* tables,
             int64_t last)
      : shape(mix),
        layout(mix, backward, plan.workers, workspace),
        x(t.x),
        y(t.y),
        dx(t.dx),
        dy(t.dy),
        weights(w),
        dweights(dw),
        premix(problem),
        rope(tables),
        end(last),
        blocks(backward ? mix.partials() : mix.blocks()),
        rows(backward ? WeightRows(dw).rows : 0) {}
};

// Positions [begin, begin + count) of a batch entry.
struct MixBlock {
  int64_t batch, begin, count;
};

MixBlock block_at(const MixShape& shape, int64_t index) {
  const int64_t begin = index % shape.blocks_per_batch() * shape.block_positions();
  return {index / shape.blocks_per_batch(), begin, std::min(shape.block_positions(), shape.seqlen - begin)};
}

// Where position `n` stands in the rotary tables; -1, not turned, in a sequence without keys: it sees nothing.
int64_t rope_position(const MixContext& context, int64_t n) {
  const PremixProblem& p = *context.premix;
  if (!p.packed) return n + p.rope_offset;
  const int32_t *cu = context.rope->cu_seqlens, *other = context.rope->cu_seqlens_other;
  const int64_t i = std::upper_bound(cu, cu + p.batch + 1, static_cast<int32_t>(n)) - cu - 1;
  if (other == nullptr) return n - cu[i] + p.rope_offset;
  const int64_t keys = int64_t{other[i + 1]} - other[i], length = int64_t{cu[i + 1]} - cu[i];
  return keys == 0 ? -1 : n - cu[i] + p.rope_offset + keys - length;
}

}  // namespace
}  // namespace plait::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {
namespace {

class MixWorker {
 public:
  MixWorker(const MixContext& context, bool backward, int32_t worker)
      : c_(context),
        shape_(context.shape),
        stride_(context.layout.stride),
        s_(context.layout.worker(context.shape, backward, worker)),
        rotation_(context.rope != nullptr ? context.premix->rope_style : RopeStyle::kHalf,
                  context.rope != nullptr ? context.premix->rope_dim : 0) {}

  void forward(const MixBlock& block) {
    load(c_.x, block, shape_.groups * shape_.in, shape_.x_pseudo, s_.x);
    turn_sources(block, s_.x, 1.0f);
    for (int64_t g = 0; g < shape_.groups; ++g) {
      multiply(shape_.out, shape_.columns(), shape_.in, {weights(g), shape_.in, 1}, {x(g), stride_}, {y(g), stride_},
               Update::kStore);
    }
    turn_mixed(block, 1.0f);
    store(c_.y, block, shape_.groups * shape_.out, shape_.y_pseudo, s_.y);
  }

  // dx of the block; adds its share of the weight gradient to `partial` [groups * out, padded(in)].
  void backward(const MixBlock& block, float* partial) {
    load(c_.x, block, shape_.groups * shape_.in, shape_.x_pseudo, s_.x);
    turn_sources(block, s_.x, 1.0f);
    load(c_.dy, block, shape_.groups * shape_.out, shape_.y_pseudo, s_.y);
    turn_mixed(block, -1.0f);
    const int64_t in_stride = padded(shape_.in);
    for (int64_t g = 0; g < shape_.groups; ++g) {
      transpose_columns(x(g));
      multiply(shape_.out, in_stride, shape_.columns(), {y(g), stride_, 1}, {s_.x_columns, in_stride},
               {partial + g * shape_.out * in_stride, in_stride}, Update::kAdd);
      multiply(shape_.in, shape_.columns(), shape_.out, {weights(g), 1, shape_.in}, {y(g), stride_}, {x(g), stride_},
               Update::kStore);
    }
    turn_sources(block, s_.x, -1.0f);
    store(c_.dx, block, shape_.groups * shape_.in, shape_.x_pseudo, s_.x);
  }

 private:
  float* x(int64_t group) const { return s_.x + group * shape_.in * stride_; }
  float* y(int64_t group) const { return s_.y + group * shape_.out * stride_; }
  const float* weights(int64_t group) const { return c_.layout.weights + group * shape_.out * shape_.in; }
  static int64_t offset(const CanonicalTensor& t, int64_t batch, int64_t position, int64_t row, int64_t pseudo) {
    return batch * t.batch_stride + row / pseudo * t.head_stride + position * t.seq_stride +
           row % pseudo * t.pseudo_stride;
  }

  void load(const CanonicalTensor& t, const MixBlock& block, int64_t rows, int64_t pseudo, float* to) {
    for (int64_t row = 0; row < rows; ++row, to += stride_) {
      for (int64_t i = 0; i < shape_.block_positions(); ++i) {
        float* at = to + i * padded(shape_.dim);
        if (i < block.count && block.begin + i < c_.end) {
          load_row(t, offset(t, block.batch, block.begin + i, row, pseudo), shape_.dim, at);
        } else {
          std::fill_n(at, padded(shape_.dim), 0.0f);
        }
      }
    }
  }

  void store(const CanonicalTensor& t, const MixBlock& block, int64_t rows, int64_t pseudo, const float* from) {
    for (int64_t row = 0; row < rows; ++row, from += stride_) {
      for (int64_t i = 0; i < block.count; ++i) {
        store_row(t, offset(t, block.batch, block.begin + i, row, pseudo), shape_.dim, from + i * padded(shape_.dim),
                  1.0f);
      }
    }
  }

  void transpose_columns(const float* from) {
    const int64_t width = padded(shape_.in);
    for (int64_t column = 0; column < shape_.columns(); ++column) {
      float* to = s_.x_columns + column * width;
      for (int64_t i = 0; i < width; ++i) to[i] = i < shape_.in ? from[i * stride_ + column] : 0.0f;
    }
  }

  // The source heads of a position turn alike (token index), before the mix.
  void turn_sources(const MixBlock& block, float* rows, float direction) {
    if (c_.rope == nullptr || c_.premix->rope_index != RopeIndex::kToken) return;
    for (int64_t i = 0; i < block.count && block.begin + i < c_.end; ++i) {
      const int64_t position = rope_position(c_, block.begin + i);
      if (position < 0) continue;
      rotation_.load(c_.rope->cos, c_.rope->sin, position, direction);
      for (int64_t row = 0; row < shape_.in; ++row) rotation_.turn(rows + row * stride_ + i * padded(shape_.dim));
    }
  }

  // Every pseudo-head of a position turns by its virtual row (row index), after the mix.
  void turn_mixed(const MixBlock& block, float direction) {
    if (c_.rope == nullptr || c_.premix->rope_index != RopeIndex::kRow) return;
    for (int64_t i = 0; i < block.count && block.begin + i < c_.end; ++i) {
      const int64_t position = rope_position(c_, block.begin + i);
      if (position < 0) continue;
      for (int64_t p = 0; p < shape_.y_pseudo; ++p) {
        rotation_.load(c_.rope->cos, c_.rope->sin, position * shape_.y_pseudo + p, direction);
        for (int64_t row = p; row < shape_.out; row += shape_.y_pseudo) {
          rotation_.turn(s_.y + row * stride_ + i * padded(shape_.dim));
        }
      }
    }
  }

  const MixContext& c_;
  const MixShape& shape_;
  const int64_t stride_;
  const MixLayout::Scratch s_;
  Rotation rotation_;
};

}  // namespace

void load_weights(const MixContext& context) {
  const WeightRows rows(context.weights);
  HWY_ALIGN float block[kColumnPad];
  for (int64_t row = 0; row < rows.rows; ++row) {
    for (int64_t i = 0; i < rows.length; i += kColumnPad) {
      const int64_t count = std::min(kColumnPad, rows.length - i);
      load_row(rows.tensor, rows.offset(row) + i * rows.tensor.dim_stride, count, block);
      std::copy_n(block, count, context.layout.weights + row * rows.length + i);
    }
  }
}

void mix_forward_body(void* argument, int32_t worker) {
  MixContext& context = *static_cast<MixContext*>(argument);
  MixWorker mix(context, false, worker);
  for (int64_t index; context.blocks.take(index);) mix.forward(block_at(context.shape, index));
}

void mix_backward_body(void* argument, int32_t worker) {
  MixContext& context = *static_cast<MixContext*>(argument);
  const MixShape& shape = context.shape;
  MixWorker mix(context, true, worker);
  const int64_t size = shape.groups * shape.out * padded(shape.in), count = shape.partials();
  for (int64_t index; context.blocks.take(index);) {
    float* partial = context.layout.partials + index * size;
    std::fill_n(partial, size, 0.0f);
    const int64_t end = (index + 1) * shape.blocks() / count;
    for (int64_t i = index * shape.blocks() / count; i < end; ++i) mix.backward(block_at(shape, i), partial);
  }
}

// Rows of the weight gradient: the partial sums in order, in double.
void mix_weight_body(void* argument, int32_t) {
  MixContext& context = *static_cast<MixContext*>(argument);
  const MixShape& shape = context.shape;
  const WeightRows rows(context.dweights);
  const int64_t in_stride = padded(shape.in), size = shape.groups * shape.out * in_stride;
  HWY_ALIGN float block[kColumnPad];
  for (int64_t row; context.rows.take(row);) {
    for (int64_t i = 0; i < rows.length; i += kColumnPad) {
      const int64_t count = std::min(kColumnPad, rows.length - i);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t linear = row * rows.length + i + j;
        double sum = 0;
        for (int64_t part = 0; part < shape.partials(); ++part) {
          sum += context.layout.partials[part * size + linear / shape.in * in_stride + linear % shape.in];
        }
        block[j] = static_cast<float>(sum);
      }
      store_row(rows.tensor, rows.offset(row) + i * rows.tensor.dim_stride, count, block, 1.0f);
    }
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace plait::cpu {
HWY_EXPORT(load_weights);
HWY_EXPORT(mix_forward_body);
HWY_EXPORT(mix_backward_body);
HWY_EXPORT(mix_weight_body);

namespace {

void run_forward_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(mix_forward_body)(context, worker); }
void run_backward_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(mix_backward_body)(context, worker); }
void run_weight_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(mix_weight_body)(context, worker); }

void run_mix(const Plan& plan, const Executor& executor, bool backward, MixContext& context) {
  HWY_DYNAMIC_DISPATCH(load_weights)(context);
  run_workers(executor, plan.workers, context.blocks.count(), context, backward ? run_backward_body : run_forward_body);
  if (backward) run_workers(executor, plan.workers, context.rows.count(), context, run_weight_body);
}

void run_premix(const Plan& plan, const PremixProblem& problem, const PremixTensors& t, void* workspace,
                const Executor& executor, bool backward) {
  const int64_t end = problem.packed ? t.cu_seqlens[problem.batch] : problem.seqlen;
  MixContext context(MixShape::of(problem), plan, workspace, backward, t, t.w, t.dw, &problem,
                     problem.has_rope ? &t : nullptr, end);
  run_mix(plan, executor, backward, context);
}

void run_collapse(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& t, void* workspace,
                  const Executor& executor, bool backward) {
  MixContext context(MixShape::of(problem), plan, workspace, backward, t, t.r, t.dr, nullptr, nullptr, problem.seqlen);
  run_mix(plan, executor, backward, context);
}

}  // namespace

void premix_forward(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                    const Executor& executor) {
  run_premix(plan, problem, tensors, workspace, executor, false);
}
void premix_backward(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                     const Executor& executor) {
  run_premix(plan, problem, tensors, workspace, executor, true);
}
void collapse_forward(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                      const Executor& executor) {
  run_collapse(plan, problem, tensors, workspace, executor, false);
}
void collapse_backward(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors,
                       void* workspace, const Executor& executor) {
  run_collapse(plan, problem, tensors, workspace, executor, true);
}

}  // namespace plait::cpu
#endif
