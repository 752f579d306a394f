// From a plan to kernels: the tensors' device, the caller's stream, the variant by dtype and head dim.
// Called by api/ through the registry.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <optional>

#include "catalog/catalog.hpp"
#include "catalog/mma_split_d_tiles.hpp"
#include "cuda/aux/aux.hpp"
#include "cuda/aux/merge_ranges.hpp"
#include "cuda/common/query_copy.hpp"
#include "cuda/cuda.hpp"
#include "cuda/iha/iha.hpp"
#include "cuda/mma/backward/backward.hpp"
#include "cuda/mma/decode/decode.hpp"
#include "cuda/mma/decode/plan.hpp"
#include "cuda/mma/prefill/prefill.hpp"
#include "cuda/mma/split_d/split_d.hpp"
#include "cuda/naive/naive.hpp"
#include "cuda/runtime/check.hpp"
#include "cuda/runtime/stream.hpp"
#include "cuda/sm90/prefill/prefill.hpp"

namespace plait::cuda {
namespace {

using mma::is_split_d;
using mma::larger_head_dim;

Stream stream_of(const Executor& executor) { return static_cast<Stream>(executor.stream); }

[[noreturn]] void refuse_variant() {
  throw Error(ErrorCode::kInternal, "backend",
              "the plan takes a kernel that this build lacks for the dtype or head dim");
}

// Calls launch<T, bucket>() for the first bucket of kBuckets that holds head_dim.
template <class T, auto kBuckets, size_t kIndex = 0, class Launch>
void launch_for(int64_t head_dim, const Launch& launch) {
  if constexpr (kIndex < kBuckets.size()) {
    if (head_dim <= kBuckets[kIndex]) return launch.template operator()<T, kBuckets[kIndex]>();
    launch_for<T, kBuckets, kIndex + 1>(head_dim, launch);
  } else {
    refuse_variant();
  }
}

template <auto kBuckets, class Launch>
void launch_variant(const AttentionProblem& problem, int64_t head_dim, const Launch& launch) {
  if constexpr (catalog::kMmaFloat16) {
    if (problem.dtype == DType::kFloat16) return launch_for<__half, kBuckets>(head_dim, launch);
  }
  if constexpr (catalog::kMmaBFloat16) {
    if (problem.dtype == DType::kBFloat16) return launch_for<__nv_bfloat16, kBuckets>(head_dim, launch);
  }
  refuse_variant();
}

// `cache_rows`: of a dense cache, else 0.
void run_mma_forward(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t smem, int64_t cache_rows,
                     Stream stream, const mma::KeyRanges& ranges = {}) {
  if (!is_split_d(problem)) {
    launch_variant<catalog::kMmaHeadDims>(problem, larger_head_dim(problem), [&]<class T, int kHeadDim>() {
      mma::launch_prefill<T, kHeadDim>(problem, tensors, smem, cache_rows, stream);
    });
  } else {
    launch_variant<catalog::kSplitDBuckets>(problem, problem.head_dim_v, [&]<class T, int kOutDim>() {
      if constexpr (catalog::kMmaSplitD) {
        mma::launch_split_d_forward<T, kOutDim>(problem, tensors, ranges, smem, cache_rows, stream);
      }
    });
  }
}

void run_mma_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace, int64_t smem,
                      Stream stream) {
  if (!is_split_d(problem)) {
    launch_variant<catalog::kMmaHeadDims>(problem, larger_head_dim(problem), [&]<class T, int kHeadDim>() {
      mma::launch_backward<T, kHeadDim>(problem, tensors, workspace, smem, stream);
    });
  } else {
    launch_variant<catalog::kSplitDBuckets>(problem, larger_head_dim(problem), [&]<class T, int kHeadDim>() {
      if constexpr (catalog::kMmaSplitD) {
        mma::launch_split_d_backward<T, kHeadDim>(problem, tensors, workspace, smem, stream);
      }
    });
  }
}

// No output but dsinks has an element.
bool is_empty(const AttentionProblem& problem) {
  return problem.heads_q == 0 || problem.heads_kv == 0 || (!problem.packed && problem.batch == 0);
}

// split_kv above the head dims of decode. `cache_rows`: of a dense cache, else 0.
void run_ranges(const Plan& plan, const mma::KeyRangeLayout& layout, const AttentionProblem& problem,
                const AttentionTensors& tensors, int64_t cache_rows, void* workspace, Stream stream) {
  if (layout.rows == 0) return;
  char* bytes = static_cast<char*>(workspace);
  const aux::RangeResults results{reinterpret_cast<float*>(bytes), reinterpret_cast<float*>(bytes + layout.out_bytes),
                                  layout.rows, layout.ranges.count, 1};
  AttentionTensors inner = aux::range_tensors(layout.problem, tensors, results);
  if (layout.heads_are_rows) {
    inner.q.seq_stride = tensors.q.head_stride;
    inner.q.head_stride = tensors.q.head_stride * (problem.heads_q / problem.heads_kv);
  }
  run_mma_forward(layout.problem, inner, plan.device.smem_per_block_bytes, cache_rows, stream, layout.ranges);
  aux::merge_ranges(results, problem, tensors, plan.device.compute_capability, stream);
}

void launch_sm90(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors,
                 const sm90::PrefillLayouts& layouts, const sm90::KeyRanges& ranges, int64_t cache_rows,
                 void* workspace, Stream stream) {
  launch_variant<catalog::kSm90HeadDims>(problem, larger_head_dim(problem), [&]<class T, int kHeadDim>() {
    if constexpr (catalog::kSm90) {
      sm90::launch_prefill<T, kHeadDim>(problem, tensors, layouts, ranges, cache_rows, plan.device.multiprocessors,
                                        workspace, stream);
    } else {
      refuse_variant();
    }
  });
}

// A call of cuda_sm90: how the copy engine reads its tensors, and with split_kv the ranges of keys.
struct Sm90Call {
  std::optional<sm90::RangeLayout> ranges;
  sm90::PrefillLayouts layouts;

  // May refuse.
  Sm90Call(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors, int64_t cache_rows) {
    if (plan.strategy == Strategy::kSplitKv) ranges.emplace(problem, plan.device);
    layouts = sm90::readable_layouts(problem, tensors, cache_rows, ranges ? ranges->group : 1);
  }
};

// split_q or split_kv of layouts that are complete.
void run_sm90_forward(const Plan& plan, const Sm90Call& call, const AttentionProblem& problem,
                      const AttentionTensors& tensors, int64_t cache_rows, void* workspace, Stream stream) {
  if (!call.ranges) return launch_sm90(plan, problem, tensors, call.layouts, {}, cache_rows, workspace, stream);
  const sm90::RangeLayout& layout = *call.ranges;
  if (layout.rows == 0) return;
  char* out = static_cast<char*>(workspace) + layout.counter_bytes;
  const aux::RangeResults results{reinterpret_cast<float*>(out), reinterpret_cast<float*>(out + layout.out_bytes),
                                  layout.rows, layout.ranges.count, call.layouts.group};
  const AttentionProblem inner = sm90::range_problem(problem, call.layouts.group);
  launch_sm90(plan, inner, aux::range_tensors(inner, tensors, results), call.layouts, layout.ranges, cache_rows,
              workspace, stream);
  aux::merge_ranges(results, problem, tensors, plan.device.compute_capability, stream);
}

// Whether decode runs a plan, up to its head dims. What cuda_sm90 was planned for and the copy engine cannot read is
// cuda_mma's by a choice of its own, if the call leaves it that.
bool decodes(const Plan& plan, const AttentionProblem& problem) {
  if (plan.strategy != Strategy::kSplitKv) return false;
  const bool asked = problem.strategy == Strategy::kSplitKv || problem.split_size > 0;
  return plan.backend != Backend::kCudaSm90 || asked || mma::split_kv_is_faster(problem, plan.device);
}

// Attention over key ranges, behind launch_prepare(); `cache_rows`: rows or pages of a cache.
void run_decode(const Plan& plan, const mma::DecodeLayout& layout, const AttentionProblem& problem,
                const AttentionTensors& tensors, int64_t cache_rows, void* workspace, Stream stream) {
  launch_variant<catalog::kMmaHeadDims>(problem, larger_head_dim(problem), [&]<class T, int kHeadDim>() {
    mma::launch_decode<T, kHeadDim>(layout, problem, tensors, cache_rows, workspace, plan.device.compute_capability,
                                    stream);
  });
}

}  // namespace

void run_attention(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                   const Executor& executor) {
  const DeviceGuard guard(problem.device.index);
  const Stream stream = stream_of(executor);
  const int64_t smem = plan.device.smem_per_block_bytes;
  const bool forward = problem.op == Op::kAttentionForward;
  if (is_empty(problem)) {
    if (!forward && problem.has_sinks)
      aux::launch_dsinks(problem, tensors, static_cast<const float*>(workspace), stream);
    return;
  }
  if (plan.backend == Backend::kCudaNaive) {
    forward ? naive::attention_forward(problem, tensors, stream)
            : naive::attention_backward(problem, tensors, workspace, stream);
    return;
  }
  if (plan.backend == Backend::kCudaSm90) {
    const Sm90Call call(plan, problem, tensors, 0);
    if (call.layouts.complete()) return run_sm90_forward(plan, call, problem, tensors, 0, workspace, stream);
  }
  // Also what the copy engine cannot read.
  if (plan.strategy == Strategy::kSplitKv && is_split_d(problem)) {
    run_ranges(plan, mma::KeyRangeLayout(problem, plan.device), problem, tensors, 0, workspace, stream);
  } else if (decodes(plan, problem)) {
    const mma::DecodeLayout layout(problem, plan.device);
    mma::launch_prepare(mma::Arrivals(layout, workspace), stream);
    run_decode(plan, layout, problem, tensors, 0, workspace, stream);
  } else if (forward) {
    run_mma_forward(problem, tensors, smem, 0, stream);
  } else {
    run_mma_backward(problem, tensors, workspace, smem, stream);
    // delta comes first in the workspace.
    if (problem.has_sinks) aux::launch_dsinks(problem, tensors, static_cast<const float*>(workspace), stream);
  }
}

void run_premix(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                const Executor& executor) {
  if (plan.backend == Backend::kCudaMma) return run_premixes(plan, {&problem, 1}, {&tensors, 1}, workspace, executor);
  const DeviceGuard guard(problem.device.index);
  const Stream stream = stream_of(executor);
  problem.op == Op::kPremixForward ? naive::premix_forward(problem, tensors, stream)
                                   : naive::premix_backward(problem, tensors, workspace, stream);
}

void run_premixes(const Plan& plan, std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                  void* workspace, const Executor& executor) {
  const DeviceGuard guard(problems[0].device.index);
  const Stream stream = stream_of(executor);
  const iha::Limits limits = iha::Limits::of(plan.device);
  plan.op == Op::kPremixForward ? iha::launch_premix_forward(problems, tensors, limits, stream)
                                : iha::launch_premix_backward(problems, tensors, workspace, limits, stream);
}

void run_collapse(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                  const Executor& executor) {
  const DeviceGuard guard(problem.device.index);
  const Stream stream = stream_of(executor);
  const bool forward = problem.op == Op::kCollapseForward;
  if (plan.backend == Backend::kCudaNaive) {
    forward ? naive::collapse_forward(problem, tensors, stream)
            : naive::collapse_backward(problem, tensors, workspace, stream);
  } else if (forward) {
    iha::launch_collapse_forward(problem, tensors, iha::Limits::of(plan.device), stream);
  } else {
    iha::launch_collapse_backward(problem, tensors, workspace, iha::Limits::of(plan.device), stream);
  }
}

void run_kvcache(const Plan& plan, const KvCacheProblem& problem, const KvCacheTensors& tensors, void* workspace,
                 const Executor& executor) {
  const AttentionProblem& attention = problem.attention;
  const DeviceGuard guard(attention.device.index);
  const Stream stream = stream_of(executor);
  if (plan.backend == Backend::kCudaNaive) return naive::attention_with_kvcache(problem, tensors, workspace, stream);
  if (is_empty(attention)) return;
  // Turned queries come last in the workspace.
  void* queries =
      static_cast<char*>(workspace) + plan.workspace_bytes - mma::aligned(query_copy_bytes(problem, attention.dtype));
  const auto prepare = [&](const mma::Arrivals& arrivals) {
    return mma::launch_prepare(arrivals, problem, tensors, queries, stream);
  };
  if (plan.backend == Backend::kCudaSm90) {
    const AttentionTensors turned = mma::prepared_tensors(problem, tensors, queries);
    const Sm90Call call(plan, attention, turned, problem.cache_rows);
    if (call.layouts.complete()) {
      prepare({});
      return run_sm90_forward(plan, call, attention, turned, problem.cache_rows, workspace, stream);
    }
  }
  // Also what the copy engine cannot read.
  if (plan.strategy == Strategy::kSplitKv && is_split_d(attention)) {
    run_ranges(plan, mma::KeyRangeLayout(attention, plan.device), attention, prepare({}), problem.cache_rows, workspace,
               stream);
  } else if (decodes(plan, attention)) {
    const mma::DecodeLayout layout(attention, plan.device);
    run_decode(plan, layout, attention, prepare(mma::Arrivals(layout, workspace)), problem.cache_rows, workspace,
               stream);
  } else {
    run_mma_forward(attention, prepare({}), plan.device.smem_per_block_bytes, problem.cache_rows, stream);
  }
}

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor) {
  const DeviceGuard guard(outputs.out.device.index);
  naive::merge_states(args, outputs, stream_of(executor));
}

void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor) {
  const DeviceGuard guard(outputs.out.device.index);
  naive::merge_states_backward(args, outputs, dout, dlse, douts, dlses, stream_of(executor));
}

}  // namespace plait::cuda
