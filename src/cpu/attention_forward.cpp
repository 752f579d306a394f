// Attention forward: tasks of lane tiles that walk their keys with online softmax; see README.md for the dataflow.
// Called by api/ through cpu.hpp.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_forward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "cpu/softmax-inl.h"

#ifndef PLAIT_CPU_ATTENTION_FORWARD_ONCE
#define PLAIT_CPU_ATTENTION_FORWARD_ONCE
#include <cmath>
#include <new>

#include "cpu/cpu.hpp"
#include "cpu/forward_layout.hpp"

namespace plait::cpu {
namespace {

struct ForwardContext {
  const AttentionProblem& problem;
  const AttentionTensors& tensors;
  const AttentionShape shape;
  const ForwardLayout layout;
  const int64_t split_size;  // keys per split, or more than any sequence has
  const int64_t tail_tasks;  // 1 when rows past the last sequence have to be filled
  TaskQueue queue;
};

// One unit of work: lane tiles [tile_begin, tile_end) of one sequence and key head, over the keys of one split.
struct ForwardTask {
  int64_t sequence, kv_head, tile_begin, tile_end;
  Interval keys;
};

}  // namespace
}  // namespace plait::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {
namespace {

class ForwardWorker {
 public:
  ForwardWorker(ForwardContext& context, int32_t worker)
      : problem_(context.problem),
        tensors_(context.tensors),
        shape_(context.shape),
        context_(context),
        softcap_(context.problem),
        scratch_(context.layout.worker(context.shape, worker)) {}

  void run(const ForwardTask& task) {
    const SequenceTiles tiles(problem_, shape_, sequence_at(problem_, tensors_, task.sequence));
    Interval block{tiles.keys, 0};  // keys seen by some tile of the task
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      reset(stats(tile - task.tile_begin));
      std::fill_n(out(tile - task.tile_begin), shape_.dim_v * kLanes, 0.0f);
      const Interval seen = tiles.visible(tile, task.keys.lo, task.keys.hi);
      if (!seen.empty()) block = {std::min(block.lo, seen.lo), std::max(block.hi, seen.hi)};
    }
    for (int64_t pass = 0; pass < shape_.passes && !block.empty(); ++pass) {
      load_queries(tiles, task, pass);
      // Key tiles start at multiples of kKeys from the split's first key, so that a row's arithmetic does not depend on
      // which tiles share its task.
      const int64_t first = task.keys.lo + (block.lo - task.keys.lo) / kKeys * kKeys;
      for (int64_t key = first; key < block.hi; key += kKeys) {
        visit_keys(tiles, task, pass, {std::max(key, block.lo), std::min(key + kKeys, block.hi)});
      }
    }
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) finish(tiles, task, tile);
  }

 private:
  float* out(int64_t slot) const { return scratch_.out + slot * shape_.dim_v * kLanes; }
  float* queries(int64_t slot) const { return scratch_.q + slot * shape_.dim * kLanes; }
  LaneStats stats(int64_t slot) const { return lane_stats(scratch_.stats + slot * kLaneStatsFloats); }

  void load_queries(const SequenceTiles& tiles, const ForwardTask& task, int64_t pass) {
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      load_lanes(tensors_.q, tiles, shape_, task.kv_head, pass, tile, shape_.dim, shape_.stride, scratch_.rows);
      transpose_lanes(scratch_.rows, shape_.stride, tiles.lane_count(tile), shape_.dim, query_factor(problem_),
                      queries(tile - task.tile_begin));
    }
  }

  void visit_keys(const SequenceTiles& tiles, const ForwardTask& task, int64_t pass, const Interval& packed) {
    bool loaded = false;
    for (int64_t tile = task.tile_begin; tile < task.tile_end; ++tile) {
      const Interval seen = tiles.visible(tile, packed.lo, packed.hi);
      if (seen.empty()) continue;
      if (!loaded) {
        load_keys(problem_, tensors_.cache, tensors_.k, tiles, shape_, task.kv_head, pass, packed, shape_.dim,
                  shape_.stride, scratch_.keys);
        load_keys(problem_, tensors_.cache, tensors_.v, tiles, shape_, task.kv_head, pass, packed, shape_.dim_v,
                  shape_.stride_v, scratch_.values, values_finite_);
        loaded = true;
      }
      attend(tiles, tile, tile - task.tile_begin, seen, seen.lo - packed.lo);
    }
  }

  // One tile: lanes of `tile` by keys `seen`, which lie from row `offset` of the packed keys on.
  void attend(const SequenceTiles& tiles, int64_t tile, int64_t slot, const Interval& seen, int64_t offset) {
    const int64_t keys = seen.hi - seen.lo, lanes = padded(tiles.lane_count(tile));
    const Left key_rows{scratch_.keys + offset * shape_.stride, shape_.stride, 1};
    multiply(keys, lanes, shape_.dim, key_rows, {queries(slot), kLanes}, {scratch_.scores, kLanes}, Update::kStore);
    LaneMask mask;
    const bool partial = tiles.partial(tile, seen);
    if (partial) mask.fill(tiles, tile, seen);
    if (partial || softcap_.on) cap_and_mask(scratch_.scores, keys, lanes, softcap_, partial ? &mask : nullptr);
    const LaneStats lane = stats(slot);
    online_softmax(scratch_.scores, keys, lanes, lane);
    const float* values = scratch_.values + offset * shape_.stride_v;
    // Of this tile's own keys: another tile's must not choose between two ways of rounding.
    const bool finite =
        std::all_of(values_finite_ + offset, values_finite_ + offset + keys, [](bool ok) { return ok; });
    if (!partial || finite) {
      multiply(shape_.dim_v, lanes, keys, {values, 1, shape_.stride_v}, {scratch_.scores, kLanes}, {out(slot), kLanes},
               Update::kScaleAdd, lane.factor);
      return;
    }
    for (int64_t i = 0; i < shape_.dim_v * kLanes; ++i) out(slot)[i] *= lane.factor[i % kLanes];
    add_seen(
        scratch_.scores, keys, lanes, mask, shape_.dim_v, kLanes,
        [&](int64_t key, int64_t) { return values + key * shape_.stride_v; },
        [&](int64_t, int64_t l) { return out(slot) + l; });
  }

  // Writes a tile whose keys are done; with several splits, merges it in their order and the last one writes.
  void finish(const SequenceTiles& tiles, const ForwardTask& task, int64_t tile) {
    const int64_t slot = tile - task.tile_begin, size = context_.split_size;
    const Interval seen = tiles.visible(tile);
    const int64_t first = seen.empty() ? 0 : seen.lo / size, last = seen.empty() ? 0 : (seen.hi - 1) / size;
    const int64_t split = task.keys.lo / size;
    if (split < first || split > last) return;
    if (first == last) return write(tiles, task.kv_head, tile, stats(slot), out(slot));
    const int64_t index = (context_.layout.tile_begin[task.sequence] + tile) * problem_.heads_kv + task.kv_head;
    float* merged = context_.layout.states + index * context_.layout.state_floats;
    const LaneStats merged_stats = lane_stats(merged + shape_.dim_v * kLanes);
    Turn& turn = context_.layout.turns[index];
    turn.wait(split - first);
    if (split == first) {
      std::copy_n(out(slot), shape_.dim_v * kLanes, merged);
      std::copy_n(stats(slot).max, kLaneStatsFloats, merged_stats.max);
    } else {
      merge_lanes(stats(slot), out(slot), merged_stats, merged, shape_.dim_v);
    }
    if (split == last) write(tiles, task.kv_head, tile, merged_stats, merged);
    turn.pass();
  }

  // Normalises, adds the sink to the denominator, rounds.
  void write(const SequenceTiles& tiles, int64_t kv_head, int64_t tile, const LaneStats& lane, const float* sums) {
    const Sequence& seq = tiles.seq;
    for (int64_t i = 0; i < tiles.lane_count(tile); ++i) {
      const int64_t head = kv_head * shape_.group + tiles.head_of(tile, i), row = tiles.row_of(tile, i);
      double max = lane.max[i], sum = lane.sum[i], weight = 1.0;
      if (tensors_.sinks != nullptr) {
        const double sink = static_cast<const float*>(tensors_.sinks)[head * tensors_.sinks_stride] * kLog2E;
        if (sink > max) weight = std::exp2(max - sink), max = sink, sum *= weight;
        if (sink != -HUGE_VAL) sum += sink == max ? 1.0 : std::exp2(sink - max);  // inf - inf is NaN
      }
      const bool empty = lane.sum[i] == 0;  // NaN is not empty
      for (int64_t k = 0; k < shape_.dim_v; ++k) scratch_.rows[k] = empty ? 0.0f : sums[k * kLanes + i];
      const CanonicalTensor& o = tensors_.out;
      store_row(o, row_offset(o, seq.batch, seq.q_begin, head, row, shape_, 0), shape_.dim_v, scratch_.rows,
                static_cast<float>(empty ? 0.0 : weight / sum));
      *row_element(tensors_.lse, seq, head, row, shape_.per) =
          sum == 0 ? -kInfinity : static_cast<float>((max + std::log2(sum)) * kLn2);
    }
  }

  const AttentionProblem& problem_;
  const AttentionTensors& tensors_;
  const AttentionShape& shape_;
  ForwardContext& context_;
  const Softcap softcap_;
  const ForwardLayout::Scratch scratch_;
  bool values_finite_[kKeys];  // of the packed values
};

// Rows of a packed problem past its last sequence: O = 0, LSE = -inf.
void fill_tail(const ForwardContext& context) {
  const AttentionProblem& p = context.problem;
  const AttentionTensors& t = context.tensors;
  const AttentionShape& shape = context.shape;
  HWY_ALIGN float zeros[catalog::kMaxHeadDim] = {};
  const int64_t end = t.cu_seqlens_q[p.batch] * shape.per, rows = p.seqlen_q * shape.per;
  for (int64_t head = 0; head < p.heads_q; ++head) {
    for (int64_t row = end; row < rows; ++row) {
      store_row(t.out, row_offset(t.out, 0, 0, head, row, shape, 0), shape.dim_v, zeros, 1.0f);
      *row_element(t.lse, Sequence{}, head, row, shape.per) = -kInfinity;
    }
  }
}

ForwardTask task_at(const ForwardContext& context, int64_t index) {
  const AttentionProblem& p = context.problem;
  const int64_t sequence = owner_of(context.layout.task_begin, p.batch, index);
  const SequenceTiles tiles(p, context.shape, sequence_at(p, context.tensors, sequence));
  // Splits slowest, so that a task rarely waits for the one before its own; late rows, long under a causal mask, first.
  const int64_t local = index - context.layout.task_begin[sequence], block_tiles = context.layout.block_tiles;
  const int64_t blocks = ceil_div(tiles.tiles, block_tiles), kv_head = local % p.heads_kv;
  const int64_t block = blocks - 1 - local / p.heads_kv % blocks, split = local / p.heads_kv / blocks;
  const int64_t begin = block * block_tiles, key = split * context.split_size;
  return {sequence,
          kv_head,
          begin,
          std::min(begin + block_tiles, tiles.tiles),
          {key, std::min(key + context.split_size, tiles.keys)}};
}

}  // namespace

void forward_body(void* argument, int32_t worker) {
  ForwardContext& context = *static_cast<ForwardContext*>(argument);
  ForwardWorker forward(context, worker);
  const int64_t tasks = context.queue.count() - context.tail_tasks;
  for (int64_t index; context.queue.take(index);) {
    if (index == tasks) {
      fill_tail(context);
    } else {
      forward.run(task_at(context, index));
    }
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace plait::cpu {
HWY_EXPORT(forward_body);

static void run_forward_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(forward_body)(context, worker); }

void attention_forward(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors,
                       void* workspace, const Executor& executor) {
  const AttentionShape shape(problem);
  const ForwardLayout layout(problem, plan, workspace);
  const bool splits = plan.splits > 1;
  const int64_t split_size = splits ? plan.split_size : INT64_MAX / 2;
  int64_t tiles_total = 0, tasks = 0;
  for (int64_t i = 0; i < problem.batch; ++i) {
    const SequenceTiles tiles(problem, shape, sequence_at(problem, tensors, i));
    layout.tile_begin[i] = tiles_total;
    layout.task_begin[i] = tasks;
    tiles_total += tiles.tiles;
    const int64_t ranges = splits ? std::max<int64_t>(1, ceil_div(tiles.keys, split_size)) : 1;
    tasks += ceil_div(tiles.tiles, layout.block_tiles) * problem.heads_kv * ranges;
  }
  layout.tile_begin[problem.batch] = tiles_total;
  layout.task_begin[problem.batch] = tasks;
  if (splits) {
    for (int64_t i = 0; i < tiles_total * problem.heads_kv; ++i) new (layout.turns + i) Turn;
  }
  const int64_t tail = problem.packed ? 1 : 0;
  ForwardContext context{problem, tensors, shape, layout, split_size, tail, TaskQueue(tasks + tail)};
  run_workers(executor, plan.workers, tasks + tail, context, run_forward_body);
}

}  // namespace plait::cpu
#endif
