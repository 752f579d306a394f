// Attention backward: probabilities recomputed from LSE, tasks that own dk and dv of a chunk of keys, dq summed in a
// fixed order; see README.md for the dataflow. Called by api/ through cpu.hpp.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention_backward.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "cpu/softmax-inl.h"

#ifndef PLAIT_CPU_ATTENTION_BACKWARD_ONCE
#define PLAIT_CPU_ATTENTION_BACKWARD_ONCE
#include <cmath>
#include <new>

#include "cpu/backward_layout.hpp"
#include "cpu/cpu.hpp"

namespace plait::cpu {
namespace {

struct BackwardContext {
  const AttentionProblem& problem;
  const AttentionTensors& tensors;
  const AttentionShape shape;
  const BackwardLayout layout;
  TaskQueue rows;    // phase 1: lane tiles of all sequences, then the tails of a packed problem
  TaskQueue chunks;  // phase 2: (chunk, key head, pass) of all sequences
  TaskQueue sinks;   // phase 3: query heads
};

// Index of a (lane tile, key head) in lse and delta.
int64_t tile_index(const BackwardContext& context, int64_t sequence, int64_t tile, int64_t kv_head) {
  return (context.layout.tile_begin[sequence] + tile) * context.problem.heads_kv + kv_head;
}

}  // namespace
}  // namespace plait::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {
namespace {

float dot(const float* a, const float* b, int64_t dim) {  // both readable and zero up to padded(dim)
  const F32 d;
  Vec sum = hn::Zero(d);
  for (int64_t i = 0; i < padded(dim); i += kVectorLanes) sum = hn::MulAdd(hn::Load(d, a + i), hn::Load(d, b + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Phase 1 of one lane tile: LSE and delta of its rows; dq of rows that no chunk will visit.
void prepare_rows(const BackwardContext& context, const BackwardLayout::Scratch& scratch, int64_t index) {
  const AttentionProblem& p = context.problem;
  const AttentionTensors& t = context.tensors;
  const AttentionShape& shape = context.shape;
  const int64_t sequence = owner_of(context.layout.tile_begin, p.batch, index);
  const SequenceTiles tiles(p, shape, sequence_at(p, t, sequence));
  const int64_t tile = index - context.layout.tile_begin[sequence];
  const bool unseen = tiles.visible(tile).empty();
  if (unseen) std::fill_n(scratch.dq, shape.stride, 0.0f);
  for (int64_t kv_head = 0; kv_head < p.heads_kv; ++kv_head) {
    float* lse = context.layout.lse + tile_index(context, sequence, tile, kv_head) * kLanes;
    float* delta = context.layout.delta + tile_index(context, sequence, tile, kv_head) * kLanes;
    load_lanes(t.out, tiles, shape, kv_head, 0, tile, shape.dim_v, shape.stride_v, scratch.values);
    load_lanes(t.dout, tiles, shape, kv_head, 0, tile, shape.dim_v, shape.stride_v, scratch.dout);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lse[lane] = delta[lane] = 0.0f;
      if (lane >= tiles.lane_count(tile)) continue;
      const int64_t head = kv_head * shape.group + tiles.head_of(tile, lane), row = tiles.row_of(tile, lane);
      const int64_t at = lane * shape.stride_v;
      lse[lane] = static_cast<float>(*row_element(t.lse, tiles.seq, head, row, shape.per) * kLog2E);
      delta[lane] = dot(scratch.values + at, scratch.dout + at, shape.dim_v);
      if (t.dlse.data != nullptr) delta[lane] -= *row_element(t.dlse, tiles.seq, head, row, shape.per);
      for (int64_t pass = 0; unseen && pass < shape.passes; ++pass) {
        const int64_t offset = row_offset(t.dq, tiles.seq.batch, tiles.seq.q_begin, head, row, shape, pass);
        store_row(t.dq, offset, shape.dim, scratch.dq, 0.0f);
      }
    }
  }
}

// Phase 2: one chunk of keys of one key head and pass.
class ChunkTask {
 public:
  ChunkTask(BackwardContext& context, const BackwardLayout::Scratch& scratch, int64_t index)
      : problem_(context.problem),
        tensors_(context.tensors),
        shape_(context.shape),
        context_(context),
        s_(scratch),
        sequence_(owner_of(context.layout.task_begin, context.problem.batch, index)),
        tiles_(problem_, shape_, sequence_at(problem_, tensors_, sequence_)),
        softcap_(context.problem) {
    // Chunks slowest: early keys, long under a causal mask, first, and neighbours seldom wait for each other.
    const int64_t local = index - context.layout.task_begin[sequence_];
    pass_ = local % shape_.passes;
    kv_head_ = local / shape_.passes % problem_.heads_kv;
    chunk_ = local / shape_.passes / problem_.heads_kv;
    keys_ = {chunk_ * context.layout.chunk, std::min((chunk_ + 1) * context.layout.chunk, tiles_.keys)};
  }

  void run() {
    const int64_t count = keys_.hi - keys_.lo;
    std::fill_n(s_.dk, count * shape_.stride, 0.0f);
    std::fill_n(s_.dv, count * shape_.stride_v, 0.0f);
    load_chunk();
    // Every task walks the rows from the last to the first, so that tasks which share rows follow one another.
    for (int64_t tile = tiles_.tiles - 1; tile >= 0; --tile) {
      const Interval seen = tiles_.visible(tile, keys_.lo, keys_.hi);
      if (!seen.empty()) visit_rows(tile, seen);
    }
    for (int64_t key = keys_.lo; key < keys_.hi; ++key) {
      const int64_t at = key - keys_.lo;
      const float scale = static_cast<float>(problem_.scale);
      store_row(tensors_.dk, key_offset(tensors_.dk, key), shape_.dim, s_.dk + at * shape_.stride, scale);
      store_row(tensors_.dv, key_offset(tensors_.dv, key), shape_.dim_v, s_.dv + at * shape_.stride_v, 1.0f);
    }
  }

 private:
  int64_t key_offset(const CanonicalTensor& t, int64_t key) const {
    return row_offset(t, tiles_.seq.kv_batch, tiles_.seq.kv_begin, kv_head_, key, shape_, pass_);
  }

  // The keys of the chunk that some row sees; the others are not read.
  void load_chunk() {
    Interval any{keys_.hi, keys_.lo};
    for (int64_t tile = 0; tile < tiles_.tiles; ++tile) {
      const Interval seen = tiles_.visible(tile, keys_.lo, keys_.hi);
      if (!seen.empty()) any = {std::min(any.lo, seen.lo), std::max(any.hi, seen.hi)};
    }
    if (any.empty()) return;
    const int64_t at = any.lo - keys_.lo;
    const bool keys = load_keys(problem_, tensors_.cache, tensors_.k, tiles_, shape_, kv_head_, pass_, any, shape_.dim,
                                shape_.stride, s_.keys + at * shape_.stride);
    const bool values = load_keys(problem_, tensors_.cache, tensors_.v, tiles_, shape_, kv_head_, pass_, any,
                                  shape_.dim_v, shape_.stride_v, s_.values + at * shape_.stride_v);
    chunk_finite_ = keys && values;
  }

  void visit_rows(int64_t tile, const Interval& seen) {
    const int64_t lanes = tiles_.lane_count(tile);
    const bool q = load_lanes(tensors_.q, tiles_, shape_, kv_head_, pass_, tile, shape_.dim, shape_.stride, s_.q);
    const bool dout =
        load_lanes(tensors_.dout, tiles_, shape_, kv_head_, 0, tile, shape_.dim_v, shape_.stride_v, s_.dout);
    transpose_lanes(s_.q, shape_.stride, lanes, shape_.dim, query_factor(problem_), s_.q_lanes);
    transpose_lanes(s_.dout, shape_.stride_v, lanes, shape_.dim_v, 1.0f, s_.dout_lanes);
    std::fill_n(s_.dq, lanes * shape_.stride, 0.0f);
    const bool finite = chunk_finite_ && q && dout;
    for (int64_t key = keys_.lo; key < seen.hi; key += kKeys) {
      const Interval part{std::max(key, seen.lo), std::min(key + kKeys, seen.hi)};
      if (!part.empty()) visit_tile(tile, part, finite);
    }
    add_dq(tile, lanes);
  }

  void visit_tile(int64_t tile, const Interval& part, bool finite) {
    const int64_t index = tile_index(context_, sequence_, tile, kv_head_) * kLanes;
    const float* lse = context_.layout.lse + index;
    const int64_t keys = part.hi - part.lo, lanes = tiles_.lane_count(tile), columns = padded(lanes);
    const int64_t at = part.lo - keys_.lo, dim = padded(shape_.dim), dim_v = padded(shape_.dim_v);
    float *k = s_.keys + at * shape_.stride, *v = s_.values + at * shape_.stride_v;
    float *dk = s_.dk + at * shape_.stride, *dv = s_.dv + at * shape_.stride_v;
    const Rows<float> scores{s_.scores, kLanes}, dp{s_.dp, kLanes};
    multiply(keys, columns, shape_.dim, {k, shape_.stride, 1}, {s_.q_lanes, kLanes}, scores, Update::kStore);
    multiply(keys, columns, shape_.dim_v, {v, shape_.stride_v, 1}, {s_.dout_lanes, kLanes}, dp, Update::kStore);
    bool partial = tiles_.partial(tile, part);
    for (int64_t lane = 0; lane < lanes; ++lane) partial |= lse[lane] == -kInfinity;
    LaneMask mask;
    if (partial) {
      mask.fill(tiles_, tile, part);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        if (lse[lane] == -kInfinity) mask.hide(lane);  // an empty row, or one whose LSE from outside says so
      }
    }
    softmax_backward(s_.scores, s_.dp, keys, columns, lse, context_.layout.delta + index, softcap_,
                     partial ? &mask : nullptr);
    if (!partial || finite) {
      multiply(keys, dim_v, lanes, {s_.scores, kLanes, 1}, {s_.dout, shape_.stride_v}, {dv, shape_.stride_v},
               Update::kAdd);
      multiply(keys, dim, lanes, {s_.dp, kLanes, 1}, {s_.q, shape_.stride}, {dk, shape_.stride}, Update::kAdd);
      multiply(lanes, dim, keys, {s_.dp, 1, kLanes}, {k, shape_.stride}, {s_.dq, shape_.stride}, Update::kAdd);
      return;
    }
    const auto row = [](float* base, int64_t stride) {
      return [base, stride](int64_t key, int64_t) { return base + key * stride; };
    };
    const auto lane_row = [](float* base, int64_t stride) {
      return [base, stride](int64_t, int64_t lane) { return base + lane * stride; };
    };
    add_seen(s_.scores, keys, lanes, mask, shape_.dim_v, 1, lane_row(s_.dout, shape_.stride_v),
             row(dv, shape_.stride_v));
    add_seen(s_.dp, keys, lanes, mask, shape_.dim, 1, lane_row(s_.q, shape_.stride), row(dk, shape_.stride));
    add_seen(s_.dp, keys, lanes, mask, shape_.dim, 1, row(k, shape_.stride), lane_row(s_.dq, shape_.stride));
  }

  // dq of a tile gets the chunks it sees in ascending order; the last one writes the rounded sum.
  void add_dq(int64_t tile, int64_t lanes) {
    const Interval seen = tiles_.visible(tile);
    const int64_t first = seen.lo / context_.layout.chunk, last = (seen.hi - 1) / context_.layout.chunk;
    if (first == last) return write_dq(tile, lanes, s_.dq);
    const int64_t index = tile_index(context_, sequence_, tile, kv_head_) * shape_.passes + pass_;
    float* HWY_RESTRICT sum = context_.layout.dq + index * kLanes * shape_.stride;
    const float* HWY_RESTRICT part = s_.dq;
    Turn& turn = context_.layout.turns[index];
    turn.wait(chunk_ - first);
    if (chunk_ == first) {
      std::copy_n(part, lanes * shape_.stride, sum);
    } else {
      for (int64_t i = 0; i < lanes * shape_.stride; ++i) sum[i] += part[i];
    }
    if (chunk_ == last) write_dq(tile, lanes, sum);
    turn.pass();
  }

  void write_dq(int64_t tile, int64_t lanes, const float* sum) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t head = kv_head_ * shape_.group + tiles_.head_of(tile, lane), row = tiles_.row_of(tile, lane);
      const int64_t offset = row_offset(tensors_.dq, tiles_.seq.batch, tiles_.seq.q_begin, head, row, shape_, pass_);
      store_row(tensors_.dq, offset, shape_.dim, sum + lane * shape_.stride, static_cast<float>(problem_.scale));
    }
  }

  const AttentionProblem& problem_;
  const AttentionTensors& tensors_;
  const AttentionShape& shape_;
  BackwardContext& context_;
  const BackwardLayout::Scratch& s_;
  const int64_t sequence_;
  const SequenceTiles tiles_;
  const Softcap softcap_;
  int64_t pass_, kv_head_, chunk_;
  Interval keys_;  // of this chunk
  bool chunk_finite_ = true;
};

// Gradients of packed rows and keys past the last sequence are zero.
void zero_tails(const BackwardContext& context) {
  const AttentionProblem& p = context.problem;
  const AttentionTensors& t = context.tensors;
  const AttentionShape& shape = context.shape;
  HWY_ALIGN float zeros[catalog::kMaxHeadDim] = {};
  const auto zero = [&](const CanonicalTensor& tensor, int64_t heads, int64_t begin, int64_t end, int64_t dim) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t row = begin * shape.per; row < end * shape.per; ++row) {
        for (int64_t pass = 0; pass < shape.passes; ++pass) {
          store_row(tensor, row_offset(tensor, 0, 0, head, row, shape, pass), dim, zeros, 1.0f);
        }
      }
    }
  };
  zero(t.dq, p.heads_q, t.cu_seqlens_q[p.batch], p.seqlen_q, shape.dim);
  zero(t.dk, p.heads_kv, t.cu_seqlens_kv[p.batch], p.seqlen_kv, shape.dim);
  zero(t.dv, p.heads_kv, t.cu_seqlens_kv[p.batch], p.seqlen_kv, shape.dim_v);
}

}  // namespace

void backward_rows_body(void* argument, int32_t worker) {
  BackwardContext& context = *static_cast<BackwardContext*>(argument);
  const BackwardLayout::Scratch scratch = context.layout.worker(context.shape, worker);
  const int64_t tiles = context.layout.tile_begin[context.problem.batch];
  for (int64_t index; context.rows.take(index);) {
    if (index == tiles) {
      zero_tails(context);
    } else {
      prepare_rows(context, scratch, index);
    }
  }
}

void backward_chunks_body(void* argument, int32_t worker) {
  BackwardContext& context = *static_cast<BackwardContext*>(argument);
  const BackwardLayout::Scratch scratch = context.layout.worker(context.shape, worker);
  for (int64_t index; context.chunks.take(index);) ChunkTask(context, scratch, index).run();
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace plait::cpu {
HWY_EXPORT(backward_rows_body);
HWY_EXPORT(backward_chunks_body);

namespace {

void run_rows_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(backward_rows_body)(context, worker); }
void run_chunks_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(backward_chunks_body)(context, worker); }

// dsink[h] = -sum_i exp(sink - LSE[i]) delta[i], rows in order. From the LSE given, not from its copy in base 2, whose
// rounding would be a factor here: a row without keys has LSE = sink and weighs exactly 1.
void run_sinks_body(void* argument, int32_t) {
  BackwardContext& context = *static_cast<BackwardContext*>(argument);
  const AttentionProblem& p = context.problem;
  const AttentionTensors& t = context.tensors;
  const AttentionShape& shape = context.shape;
  for (int64_t head; context.sinks.take(head);) {
    const double sink = static_cast<const float*>(t.sinks)[head * t.sinks_stride];
    double sum = 0;
    for (int64_t sequence = 0; sequence < p.batch; ++sequence) {
      const SequenceTiles tiles(p, shape, sequence_at(p, t, sequence));
      for (int64_t lane = head % shape.group; lane < tiles.lanes; lane += shape.group) {
        const int64_t tile = tile_index(context, sequence, lane / kLanes, head / shape.group);
        const int64_t at = tile * kLanes + lane % kLanes;
        const double lse = *row_element(t.lse, tiles.seq, head, tiles.row_of(lane / kLanes, lane % kLanes), shape.per);
        if (lse == -HUGE_VAL) continue;  // from outside: a row without weight
        sum -= (lse == sink ? 1.0 : std::exp(sink - lse)) * context.layout.delta[at];
      }
    }
    static_cast<float*>(t.dsinks)[head * t.dsinks_stride] = static_cast<float>(sum);
  }
}

}  // namespace

void attention_backward(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors,
                        void* workspace, const Executor& executor) {
  const AttentionShape shape(problem);
  const BackwardLayout layout(problem, plan, workspace);
  int64_t tiles_total = 0, tasks = 0;
  for (int64_t i = 0; i < problem.batch; ++i) {
    const SequenceTiles tiles(problem, shape, sequence_at(problem, tensors, i));
    layout.tile_begin[i] = tiles_total;
    layout.task_begin[i] = tasks;
    tiles_total += tiles.tiles;
    tasks += ceil_div(tiles.keys, layout.chunk) * problem.heads_kv * shape.passes;
  }
  layout.tile_begin[problem.batch] = tiles_total;
  layout.task_begin[problem.batch] = tasks;
  if (problem.seqlen_kv * shape.per > layout.chunk) {
    for (int64_t i = 0; i < tiles_total * problem.heads_kv * shape.passes; ++i) new (layout.turns + i) Turn;
  }
  const int64_t row_tasks = tiles_total + (problem.packed ? 1 : 0), sinks = problem.has_sinks ? problem.heads_q : 0;
  BackwardContext context{problem, tensors, shape, layout, TaskQueue(row_tasks), TaskQueue(tasks), TaskQueue(sinks)};
  run_workers(executor, plan.workers, row_tasks, context, run_rows_body);
  run_workers(executor, plan.workers, tasks, context, run_chunks_body);
  run_workers(executor, plan.workers, sinks, context, run_sinks_body);
}

}  // namespace plait::cpu
#endif
