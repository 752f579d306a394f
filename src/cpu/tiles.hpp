// What the tile loops share and no SIMD touches: sizes, lanes, row addresses, task order, workspace carving.
// Called by the planner (to count bytes) and by the op files (to run).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "catalog/catalog.hpp"
#include "core/mask.hpp"
#include "core/rounding.hpp"

namespace plait::cpu {

// A tile is kLanes softmax rows by up to kKeys keys. A lane is one (row, query head) pair: the heads of a GQA group
// stand side by side, lane = row * group + head, so that they share packed keys and fill tiles when rows are few.
inline constexpr int64_t kLanes = catalog::kCpuTileM;
inline constexpr int64_t kKeys = catalog::kCpuTileN;
inline constexpr int64_t kColumnPad = 16;  // floats: one cache line, and the widest vector
static_assert(kLanes % kColumnPad == 0);

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

constexpr int64_t padded(int64_t dim) { return round_up(dim, kColumnPad); }
// Row stride of a packed [rows, dim] buffer: an odd number of cache lines, so that a column walk uses every cache set.
constexpr int64_t row_stride(int64_t dim) { return (ceil_div(dim, kColumnPad) | 1) * kColumnPad; }

// Hands out consecutive 64-byte aligned blocks; with a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* block = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + bytes_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    bytes_ += ceil_div(bytes, catalog::kWorkspaceAlignBytes) * catalog::kWorkspaceAlignBytes;
    return block;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

// Numbers derived from a problem once.
struct AttentionShape {
  int64_t group, per, passes;            // query heads per key head, virtual rows per position, joint passes
  int64_t dim, dim_v, stride, stride_v;  // head dims and the row strides of their packed buffers
  explicit AttentionShape(const AttentionProblem& p)
      : group(p.heads_kv > 0 ? p.heads_q / p.heads_kv : 1),
        per(p.rows_per_position()),
        passes(p.joint_passes()),
        dim(p.head_dim),
        dim_v(p.head_dim_v),
        stride(row_stride(p.head_dim)),
        stride_v(row_stride(p.head_dim_v)) {}
};

// The rows and keys of one sequence, in tiles of lanes.
struct SequenceTiles {
  Sequence seq;
  RowMask mask;
  int64_t group, lanes, tiles, keys;

  SequenceTiles(const AttentionProblem& problem, const AttentionShape& shape, const Sequence& sequence)
      : seq(sequence),
        mask(RowMask::of(problem, sequence.q_len, sequence.kv_len)),
        group(shape.group),
        lanes(sequence.q_len * shape.per * shape.group),
        tiles(ceil_div(lanes, kLanes)),
        keys(sequence.kv_len * shape.per) {}

  int64_t lane_count(int64_t tile) const { return std::min(kLanes, lanes - tile * kLanes); }
  int64_t row_of(int64_t tile, int64_t lane) const { return (tile * kLanes + lane) / group; }
  int64_t head_of(int64_t tile, int64_t lane) const { return (tile * kLanes + lane) % group; }  // within the group
  int64_t row_end(int64_t tile) const { return row_of(tile, lane_count(tile) - 1) + 1; }
  // Keys seen by some row of the tile.
  Interval visible(int64_t tile) const { return mask.rows(row_of(tile, 0), row_end(tile)); }
  Interval visible(int64_t tile, int64_t begin, int64_t end) const {
    const Interval all = visible(tile);
    return {std::max(all.lo, begin), std::min(all.hi, end)};
  }
  bool partial(int64_t tile, const Interval& keys_of_tile) const {
    return mask.classify(row_of(tile, 0), row_end(tile), keys_of_tile.lo, keys_of_tile.hi) != TileClass::kFull;
  }
};

// Element offset of a softmax row or key: `row` counts within the sequence that begins at position `begin`.
inline int64_t row_offset(const CanonicalTensor& t, int64_t batch, int64_t begin, int64_t head, int64_t row,
                          const AttentionShape& shape, int64_t pass) {
  const int64_t position = shape.per == 1 ? row : row / shape.per;
  const int64_t pseudo = shape.per == 1 ? pass : row % shape.per;
  return batch * t.batch_stride + head * t.head_stride + (begin + position) * t.seq_stride + pseudo * t.pseudo_stride;
}

inline float* row_element(const RowTensor& t, const Sequence& seq, int64_t head, int64_t row, int64_t per) {
  return static_cast<float*>(t.data) + seq.batch * t.batch_stride + head * t.head_stride +
         (seq.q_begin * per + row) * t.row_stride;
}

// Prefix sums over sequences: sequence i owns indices [begin[i], begin[i + 1]).
inline int64_t owner_of(const int64_t* begin, int64_t count, int64_t index) {
  return std::upper_bound(begin, begin + count + 1, index) - begin - 1;
}

// Tasks 0, 1, ... handed out in order; a task may wait only for lower-numbered ones, which have been handed out before.
class TaskQueue {
 public:
  explicit TaskQueue(int64_t count) : count_(count) {}
  bool take(int64_t& task) { return (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }
  int64_t count() const { return count_; }

 private:
  std::atomic<int64_t> next_{0};
  int64_t count_;
};

// Runs body(context, worker) on as many of the plan's workers as there are tasks.
template <class Context>
void run_workers(const Executor& executor, int32_t workers, int64_t tasks, Context& context,
                 void (*body)(void*, int32_t)) {
  if (tasks <= 0) return;
  executor.run(executor.context, static_cast<int32_t>(std::min<int64_t>(workers, tasks)), body, &context);
}

// Fixed order among the tasks that add to one buffer: the k-th adds when its turn comes. It makes sums independent of
// timing without a partial buffer per task.
class Turn {
 public:
  void wait(int64_t k) const {
    while (now_.load(std::memory_order_acquire) != k) std::this_thread::yield();
  }
  void pass() { now_.fetch_add(1, std::memory_order_release); }

 private:
  std::atomic<int64_t> now_{0};
};

}  // namespace plait::cpu
