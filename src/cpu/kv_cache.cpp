// One step over a cache: append the new keys in place, rotate, mix (IHA), then the attention of attention_forward.cpp.
// Called by api/ through cpu.hpp.
#include "cpu/targets.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kv_cache.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.
#include "cpu/rope-inl.h"
#include "cpu/tile_io-inl.h"

#ifndef PLAIT_CPU_KV_CACHE_ONCE
#define PLAIT_CPU_KV_CACHE_ONCE
#include "cpu/cpu.hpp"

namespace plait::cpu {
namespace {

// Rows [batch, heads, rows, pseudo, dim] of `from` to `to`, which may be the cache.
struct RowCopy {
  const KvCacheProblem& problem;
  const KvCacheTensors& tensors;
  CanonicalTensor from, to;
  int64_t heads, rows, pseudo, dim;
  bool append;      // to the cache, from position seqlens[b] on; else row by row
  bool turn;        // by position: the rows are the last `rows` of their sequence
  TaskQueue queue;  // (batch, head)
};

}  // namespace
}  // namespace plait::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {

void copy_rows_body(void* argument, int32_t) {
  RowCopy& c = *static_cast<RowCopy*>(argument);
  const AttentionProblem& attention = c.problem.attention;
  HWY_ALIGN float row[catalog::kMaxHeadDim];
  Rotation rotation(c.problem.rope_style, c.problem.rope_dim);
  for (int64_t task; c.queue.take(task);) {
    const int64_t batch = task / c.heads, head = task % c.heads;
    const Sequence sequence = sequence_at(attention, c.tensors.attention, batch);
    const int64_t first = sequence.kv_len - c.rows;  // position of the first row
    for (int64_t i = 0; i < c.rows; ++i) {
      if (c.turn) rotation.load(c.tensors.cos, c.tensors.sin, first + i, 1.0f);
      const int64_t from = batch * c.from.batch_stride + head * c.from.head_stride + i * c.from.seq_stride;
      const int64_t to = c.append ? key_offset(attention, c.tensors.attention.cache, c.to, sequence, head, first + i)
                                  : batch * c.to.batch_stride + head * c.to.head_stride + i * c.to.seq_stride;
      for (int64_t p = 0; p < c.pseudo; ++p) {
        load_row(c.from, from + p * c.from.pseudo_stride, c.dim, row);
        if (c.turn) rotation.turn(row);
        store_row(c.to, to + p * c.to.pseudo_stride, c.dim, row, 1.0f);
      }
    }
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace plait::cpu {
HWY_EXPORT(copy_rows_body);

namespace {

void run_copy_body(void* context, int32_t worker) { HWY_DYNAMIC_DISPATCH(copy_rows_body)(context, worker); }

CanonicalTensor contiguous(float* data, int64_t heads, int64_t rows, int64_t pseudo, int64_t dim) {
  return {data, DType::kFloat32, heads * rows * pseudo * dim, rows * pseudo * dim, pseudo * dim, dim, 1};
}

PremixProblem premix_of(const KvCacheProblem& p, int64_t batch, int64_t heads, int64_t rows, int64_t dim, DType dtype) {
  PremixProblem mix;
  mix.batch = batch;
  mix.heads = heads;
  mix.seqlen = rows;
  mix.pseudo_heads = p.attention.pseudo_heads;
  mix.head_dim = dim;
  mix.dtype = dtype;
  mix.weight_dtype = p.weight_dtype;
  return mix;
}

// fp32 copies that the attention reads instead of its inputs, then the workspace of the step that needs most.
struct StepLayout {
  CanonicalTensor q_turned, q_mixed;  // [batch, heads_q, seqlen_q, 1 | P, head_dim]
  CanonicalTensor k_turned;           // mixed caches: [batch, heads_kv, new_keys, 1, head_dim]
  CanonicalTensor k_mixed, v_mixed;   // mixed caches: of the new keys; raw caches: of one whole sequence
  char* inner;
  int64_t inner_bytes = 0, total_bytes;

  StepLayout(const KvCacheProblem& p, const Plan& plan, void* base) {
    const AttentionProblem& a = p.attention;
    Carver carver(base);
    const auto take = [&](int64_t batch, int64_t heads, int64_t rows, int64_t pseudo, int64_t dim) {
      return contiguous(carver.take<float>(batch * heads * rows * pseudo * dim), heads, rows, pseudo, dim);
    };
    if (p.has_rope) q_turned = take(a.batch, a.heads_q, a.seqlen_q, 1, a.head_dim);
    if (p.iha) {
      q_mixed = take(a.batch, a.heads_q, a.seqlen_q, a.pseudo_heads, a.head_dim);
      if (p.mixed() && p.has_rope) k_turned = take(a.batch, a.heads_kv, a.new_keys, 1, a.head_dim);
      const int64_t batch = p.mixed() ? a.batch : 1, rows = p.mixed() ? a.new_keys : a.seqlen_kv;
      k_mixed = take(batch, a.heads_kv, rows, a.pseudo_heads, a.head_dim);
      v_mixed = take(batch, a.heads_kv, rows, a.pseudo_heads, a.head_dim_v);
      need(premix_of(p, a.batch, a.heads_q, a.seqlen_q, a.head_dim, a.dtype), plan);
      need(premix_of(p, batch, a.heads_kv, rows, std::max(a.head_dim, a.head_dim_v), a.dtype), plan);
      need(premix_of(p, batch, a.heads_kv, rows, std::min(a.head_dim, a.head_dim_v), a.dtype), plan);
    }
    Plan attention = plan;
    plan_attention(attention_problem(p), plan.device, attention);
    inner_bytes = std::max(inner_bytes, attention.workspace_bytes);
    inner = carver.take<char>(inner_bytes);
    total_bytes = carver.bytes();
  }

  // What attention_forward sees: raw IHA runs one sequence at a time.
  static AttentionProblem attention_problem(const KvCacheProblem& p) {
    AttentionProblem attention = p.attention;
    attention.op = Op::kAttentionForward;
    if (p.raw()) attention.batch = 1;
    return attention;
  }

 private:
  void need(const PremixProblem& mix, const Plan& plan) {
    Plan inner_plan;
    plan_premix(mix, plan.device, inner_plan);
    inner_bytes = std::max(inner_bytes, inner_plan.workspace_bytes);
  }
};

// Runs the steps in order; each is parallel within.
class Step {
 public:
  Step(const Plan& plan, const KvCacheProblem& problem, const KvCacheTensors& tensors, void* workspace,
       const Executor& executor)
      : plan_(plan),
        p_(problem),
        a_(problem.attention),
        t_(tensors),
        executor_(executor),
        layout_(problem, plan, workspace) {}

  void run() {
    AttentionTensors attention = t_.attention;
    if (layout_.q_turned.data != nullptr) {
      copy(t_.attention.q, layout_.q_turned, a_.heads_q, a_.seqlen_q, 1, a_.head_dim, false, true);
      attention.q = layout_.q_turned;
    }
    if (p_.iha) {
      premix(attention.q, layout_.q_mixed, t_.w_q, a_.batch, a_.heads_q, a_.seqlen_q, a_.head_dim);
      attention.q = layout_.q_mixed;
    }
    if (a_.new_keys > 0) append();
    const AttentionProblem problem = StepLayout::attention_problem(p_);
    if (!p_.raw()) {
      attention_forward(plan_, problem, attention, layout_.inner, executor_);
      return;
    }
    for (int64_t b = 0; b < a_.batch; ++b) attend_raw(problem, attention, b);
  }

 private:
  void append() {
    if (!p_.mixed()) {
      copy(t_.k_new, t_.attention.k, a_.heads_kv, a_.new_keys, 1, a_.head_dim, true, p_.has_rope);
      copy(t_.v_new, t_.attention.v, a_.heads_kv, a_.new_keys, 1, a_.head_dim_v, true, false);
      return;
    }
    CanonicalTensor keys = t_.k_new;
    if (p_.has_rope) {
      copy(keys, layout_.k_turned, a_.heads_kv, a_.new_keys, 1, a_.head_dim, false, true);
      keys = layout_.k_turned;
    }
    premix(keys, layout_.k_mixed, t_.w_k, a_.batch, a_.heads_kv, a_.new_keys, a_.head_dim);
    premix(t_.v_new, layout_.v_mixed, t_.w_v, a_.batch, a_.heads_kv, a_.new_keys, a_.head_dim_v);
    copy(layout_.k_mixed, t_.attention.k, a_.heads_kv, a_.new_keys, a_.pseudo_heads, a_.head_dim, true, false);
    copy(layout_.v_mixed, t_.attention.v, a_.heads_kv, a_.new_keys, a_.pseudo_heads, a_.head_dim_v, true, false);
  }

  // Mixes the keys and values of one sequence, then attends to them.
  void attend_raw(const AttentionProblem& problem, AttentionTensors attention, int64_t b) {
    const Sequence sequence = sequence_at(a_, t_.attention, b);
    const auto row_of = [](CanonicalTensor tensor, int64_t row) {
      tensor.data = static_cast<char*>(tensor.data) + row * tensor.batch_stride * dtype_bytes(tensor.dtype);
      return tensor;
    };
    premix(row_of(attention.k, sequence.kv_batch), layout_.k_mixed, t_.w_k, 1, a_.heads_kv, sequence.kv_len,
           a_.head_dim);
    premix(row_of(attention.v, sequence.kv_batch), layout_.v_mixed, t_.w_v, 1, a_.heads_kv, sequence.kv_len,
           a_.head_dim_v);
    attention.q = row_of(attention.q, b);
    attention.out = row_of(attention.out, b);
    attention.lse.data = static_cast<float*>(attention.lse.data) + b * attention.lse.batch_stride;
    attention.k = layout_.k_mixed;
    attention.v = layout_.v_mixed;
    attention.cache = {t_.attention.cache.seqlens + b, nullptr, nullptr, 0};
    attention_forward(plan_, problem, attention, layout_.inner, executor_);
  }

  void copy(const CanonicalTensor& from, const CanonicalTensor& to, int64_t heads, int64_t rows, int64_t pseudo,
            int64_t dim, bool append_rows, bool turn) {
    RowCopy context{p_, t_, from, to, heads, rows, pseudo, dim, append_rows, turn, TaskQueue(a_.batch * heads)};
    run_workers(executor_, plan_.device.workers, a_.batch * heads, context, run_copy_body);
  }

  void premix(const CanonicalTensor& x, const CanonicalTensor& y, const TensorView& w, int64_t batch, int64_t heads,
              int64_t rows, int64_t dim) {
    const PremixProblem problem = premix_of(p_, batch, heads, rows, dim, x.dtype);
    Plan inner;
    plan_premix(problem, plan_.device, inner);
    PremixTensors tensors;
    tensors.x = x;
    tensors.y = y;
    tensors.w = w;
    premix_forward(inner, problem, tensors, layout_.inner, executor_);
  }

  const Plan& plan_;
  const KvCacheProblem& p_;
  const AttentionProblem& a_;
  const KvCacheTensors& t_;
  const Executor& executor_;
  const StepLayout layout_;
};

}  // namespace

void plan_kvcache(const KvCacheProblem& problem, const DeviceInfo& device, Plan& plan) {
  plan.device = device;
  const StepLayout layout(problem, plan, nullptr);
  plan_attention(StepLayout::attention_problem(problem), device, plan);
  plan.workspace_bytes = layout.total_bytes;
  if (problem.raw())
    plan.reasons.emplace_back("raw cache: keys and values are mixed one sequence at a time, then attended");
}

void attention_with_kvcache(const Plan& plan, const KvCacheProblem& problem, const KvCacheTensors& tensors,
                            void* workspace, const Executor& executor) {
  Step(plan, problem, tensors, workspace, executor).run();
}

}  // namespace plait::cpu
#endif
