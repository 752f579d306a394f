// merge_states and its gradients: validate, then row-parallel scalar loops (a few operations per element,
// memory-bound). Called by C++ users and the torch shim.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "catalog/catalog.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "cpu/cpu.hpp"

namespace plait::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

struct Rows {
  Axes axes;
  int64_t heads, rows, dim, total;  // total = batch * heads * rows

  struct Position {
    int64_t batch, head, row;
  };
  Position at(int64_t index) const { return {index / (heads * rows), index / rows % heads, index % rows}; }
  int64_t offset(const TensorView& view, const Position& p) const {
    const CanonicalTensor t = canonical(view, axes);
    return p.batch * t.batch_stride + p.head * t.head_stride + p.row * t.seq_stride;
  }
  int64_t lse_offset(const TensorView& view, const Position& p) const {
    if (view.rank == 2) return p.head * view.stride[0] + p.row * view.stride[1];
    return p.batch * view.stride[0] + p.head * view.stride[1] + p.row * view.stride[2];
  }
};

Rows rows_of(const MergeArgs& args, const TensorView& out) {
  const Axes axes = axes_of(args.layout, args.packed, /*pseudo=*/false);
  Rows rows{axes, extent(out, axes.heads), extent(out, axes.seqlen), extent(out, axes.dim), 0};
  rows.total = extent(out, axes.batch) * rows.heads * rows.rows;
  return rows;
}

// body(row index) for every row, spread over the executor's workers.
template <class Body>
void for_each_row(int64_t total, const Executor& executor, int32_t workers, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t total;
    const Body* body;
  } shared{.total = total, .body = &body};
  const auto work = [](void* arg, int32_t) {
    auto& state = *static_cast<Shared*>(arg);
    for (int64_t begin; (begin = state.next.fetch_add(kRowsPerTask)) < state.total;) {
      for (int64_t i = begin; i < std::min(begin + kRowsPerTask, state.total); ++i) (*state.body)(i);
    }
  };
  executor.run(executor.context, workers, work, &shared);
}

template <class T>
T* data(const TensorView& view) {
  return static_cast<T*>(view.data);
}

template <class Lse>
Lse merged_lse(const MergeArgs& args, const Rows& rows, const Rows::Position& at) {
  Lse max = -std::numeric_limits<Lse>::infinity();
  const auto lse = [&](int64_t i) { return data<Lse>(args.lses[i])[rows.lse_offset(args.lses[i], at)]; };
  for (int64_t i = 0; i < args.parts; ++i) max = std::isnan(lse(i)) ? lse(i) : std::max(max, lse(i));
  if (!std::isfinite(max)) return max;  // all empty, or a NaN or +inf that came in
  Lse sum = 0;
  for (int64_t i = 0; i < args.parts; ++i) sum += std::exp(lse(i) - max);
  return max + std::log(sum);
}

template <class Lse>
Lse weight_of(Lse part, Lse merged) {
  return part == -std::numeric_limits<Lse>::infinity() ? Lse{0} : std::exp(part - merged);
}

template <class T, class Lse>
void forward(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  const Rows rows = rows_of(args, outputs.out);
  for_each_row(rows.total, executor, workers, [&](int64_t index) {
    const Rows::Position at = rows.at(index);
    const Lse merged = merged_lse<Lse>(args, rows, at);
    data<Lse>(outputs.lse)[rows.lse_offset(outputs.lse, at)] = merged;
    Lse sums[catalog::kMaxHeadDim] = {};
    for (int64_t i = 0; i < args.parts; ++i) {
      const TensorView& part = args.outs[i];
      const Lse weight = weight_of(data<Lse>(args.lses[i])[rows.lse_offset(args.lses[i], at)], merged);
      if (weight == 0) continue;  // an empty part may hold anything
      const T* from = data<T>(part) + rows.offset(part, at);
      const int64_t step = part.stride[rows.axes.dim];
      for (int64_t d = 0; d < rows.dim; ++d) sums[d] += weight * to_float(from[d * step]);
    }
    T* out = data<T>(outputs.out) + rows.offset(outputs.out, at);
    for (int64_t d = 0; d < rows.dim; ++d) from_float(sums[d], out[d * outputs.out.stride[rows.axes.dim]]);
  });
}

// d out_i = w_i dout;  d lse_i = w_i (dout . out_i - dout . out + dlse), w_i = exp(lse_i - lse).
template <class T, class Lse>
void backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout, const TensorView* dlse,
              const TensorView* douts, const TensorView* dlses, const Executor& executor, int32_t workers) {
  const Rows rows = rows_of(args, outputs.out);
  const auto value = [&](const TensorView& view, const Rows::Position& at, int64_t d) {
    return to_float(data<T>(view)[rows.offset(view, at) + d * view.stride[rows.axes.dim]]);
  };
  for_each_row(rows.total, executor, workers, [&](int64_t index) {
    const Rows::Position at = rows.at(index);
    const Lse merged = merged_lse<Lse>(args, rows, at);
    const Lse from_lse = dlse != nullptr ? data<Lse>(*dlse)[rows.lse_offset(*dlse, at)] : Lse{0};
    Lse mean = 0;  // dout . out
    for (int64_t d = 0; d < rows.dim; ++d) mean += value(dout, at, d) * value(outputs.out, at, d);
    for (int64_t i = 0; i < args.parts; ++i) {
      const Lse weight = weight_of(data<Lse>(args.lses[i])[rows.lse_offset(args.lses[i], at)], merged);
      T* dpart = data<T>(douts[i]) + rows.offset(douts[i], at);
      Lse dot = 0;
      for (int64_t d = 0; d < rows.dim; ++d) {
        const Lse gradient = value(dout, at, d);
        if (weight != 0) dot += gradient * value(args.outs[i], at, d);
        from_float(weight == 0 ? Lse{0} : weight * gradient, dpart[d * douts[i].stride[rows.axes.dim]]);
      }
      data<Lse>(dlses[i])[rows.lse_offset(dlses[i], at)] = weight == 0 ? Lse{0} : weight * (dot - mean + from_lse);
    }
  });
}

template <class Run>
void by_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(Float16{}, float{});
    case DType::kBFloat16:
      return run(BFloat16{}, float{});
    case DType::kFloat64:
      return run(double{}, double{});
    default:
      return run(float{}, float{});
  }
}

}  // namespace

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers) {
  by_dtype(outputs.out.dtype, [&](auto element, auto lse) {
    forward<decltype(element), decltype(lse)>(args, outputs, executor, workers);
  });
}

void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor, int32_t workers) {
  by_dtype(outputs.out.dtype, [&](auto element, auto lse) {
    backward<decltype(element), decltype(lse)>(args, outputs, dout, dlse, douts, dlses, executor, workers);
  });
}

}  // namespace plait::cpu
