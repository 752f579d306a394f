// How the CUDA backends cut a problem: tiles and workspace. Plain C++, so that any machine can plan for any GPU.
// Called by core/plan.cpp through the registry.
#include "cuda/mma/decode/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "catalog/catalog.hpp"
#include "catalog/mma_split_d_tiles.hpp"
#include "catalog/mma_tiles.hpp"
#include "cuda/common/query_copy.hpp"
#include "cuda/cuda.hpp"
#include "cuda/iha/schedule.hpp"
#include "cuda/mma/backward/workspace.hpp"
#include "cuda/mma/decode/workspace.hpp"
#include "cuda/mma/leave.hpp"
#include "cuda/mma/split_d/ranges.hpp"
#include "cuda/mma/split_d/workspace.hpp"
#include "cuda/naive/workspace.hpp"
#include "cuda/sm90/prefill/ranges.hpp"
#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/prefill/workspace.hpp"

namespace plait::cuda {
namespace {

using mma::is_split_d;
using mma::Lack;
using mma::larger_head_dim;
using mma::leave_mma;

void note_build(Plan& plan) {
  if (!built()) plan.reasons.emplace_back("this build has no CUDA kernels: the plan can be read, not run");
}

int64_t bucket_of(const AttentionProblem& problem) { return catalog::head_dim_bucket(larger_head_dim(problem)); }

void note_bucket(const AttentionProblem& problem, int64_t bucket, int64_t smem_bytes, const DeviceInfo& device,
                 Plan& plan) {
  plan.reasons.push_back(fmt::format("head dims {} and {} run in bucket {}: {} KB of shared memory of {}",
                                     problem.head_dim, problem.head_dim_v, bucket, smem_bytes / 1024,
                                     device.smem_per_block_bytes / 1024));
}

void plan_mma_forward(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const int64_t bucket = bucket_of(problem);
  const catalog::PrefillTile& tile = catalog::prefill_tile(bucket, device.smem_per_block_bytes);
  plan.tile_m = tile.rows();
  plan.tile_n = tile.tile_keys;
  note_bucket(problem, bucket, tile.smem_bytes(), device, plan);
}

// Partial results that nobody asked for: more queries than ranges are for.
constexpr int64_t kMostRangeBytes = int64_t{256} << 20;

// Ranges of keys on Hopper: cuda_sm90's, or decode of cuda_mma, which takes 16 or 32 rows of a key head at a time and
// reads the keys for each; auto compares them, and both with one block for a row tile. A fixed split_size is decode's,
// which reads every tensor: what the copy engine reads may hang on the batch, and results must not.
void choose_sm90_strategy(const AttentionProblem& problem, const DeviceInfo& device, const sm90::RangeLayout& layout,
                          Plan& plan) {
  const bool asked = plan.strategy == Strategy::kSplitKv, empty = layout.rows == 0 || problem.seqlen_kv == 0;
  if (empty && !asked) {
    plan.strategy = Strategy::kSplitQ;
    return;
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // What cuda_sm90 cannot read is decode's; so are empty problems.
  const bool automatic = problem.backend == Backend::kAuto, fixed = problem.split_size > 0;
  if (automatic && fixed) {
    plan.strategy = Strategy::kSplitKv, plan.backend = Backend::kCudaMma;
    plan.reasons.emplace_back("split_size is cuda_mma's, which reads tensors of any strides");
    return;
  }
  const double decode = automatic || empty ? mma::split_kv_clocks(problem, device) : kNever;
  const bool fits = asked || layout.workspace_bytes() <= kMostRangeBytes;
  const double ranges = layout.in_limits() && fits && !(automatic && decode == kNever) ? layout.clocks : kNever;
  const double rows = asked ? kNever : sm90::split_q_clocks(problem, device);
  const bool by_decode = automatic && (empty || decode <= ranges) && decode <= rows;
  plan.strategy = by_decode || ranges < rows || asked ? Strategy::kSplitKv : Strategy::kSplitQ;
  if (by_decode || (automatic && ranges == kNever && asked)) plan.backend = Backend::kCudaMma;
  const auto thousands = [](double clocks) {
    return clocks == kNever ? std::string("none") : fmt::format("{:.0f}", clocks / 1000);
  };
  if (empty || !automatic) return;
  plan.reasons.push_back(fmt::format(
      "{} of {}: about {} thousand clocks over key ranges of row tiles, {} over those of cuda_mma, {} over "
      "whole rows",
      strategy_name(plan.strategy), backend_name(plan.backend), thousands(ranges), thousands(decode), thousands(rows)));
}

// `rows`: of a range. Split_kv of key ranges whose results `backend` cannot count.
[[noreturn]] void refuse_ranges(const AttentionProblem& problem, int64_t rows, Backend backend) {
  throw Error(ErrorCode::kUnsupported, problem.split_size > 0 ? "split_size" : "strategy",
              fmt::format("split_kv cannot serve this call. required: results of {} rows for each range of {} keys. "
                          "supported by {}: 2^31 results, 2^28 keys. missing: wider counters. way out: {}",
                          rows, problem.seqlen_kv, backend_name(backend),
                          problem.split_size == 0 ? "use strategy auto"
                          : rows <= INT32_MAX     ? "give a larger split_size, or use strategy auto without one"
                                                  : "use strategy auto without split_size"));
}

void plan_sm90_ranges(const AttentionProblem& problem, const DeviceInfo& device, const sm90::RangeLayout& layout,
                      Plan& plan) {
  if (!layout.in_limits()) refuse_ranges(problem, layout.rows, Backend::kCudaSm90);
  plan.splits = layout.ranges.count;
  plan.split_size = layout.ranges.keys;
  plan.workspace_bytes = layout.workspace_bytes();
  const bool empty = layout.rows == 0 || problem.seqlen_kv == 0;
  if (problem.backend == Backend::kAuto || empty) {  // decode's, of tensors that the copy engine cannot read
    const mma::DecodeLayout decode(problem, device);
    plan.workspace_bytes = std::max(plan.workspace_bytes, decode.workspace_bytes());
  }
  plan.reasons.push_back(fmt::format(
      "{}{} a row tile, in blocks of their own, then merged{}", layout.ranges.count,
      layout.ranges.keys > 0 ? fmt::format(" range(s) of {} keys for", layout.ranges.keys)
                             : std::string(" even range(s) of the keys of"),
      layout.group > 1 ? fmt::format("; the {} heads of a key head are rows of a tile", layout.group) : ""));
}

void plan_sm90_forward(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  std::optional<sm90::RangeLayout> layout;
  if (plan.strategy == Strategy::kSplitQ || problem.packed) {
    plan.strategy = Strategy::kSplitQ;
  } else {
    choose_sm90_strategy(problem, device, layout.emplace(problem, device), plan);
  }
  if (plan.backend == Backend::kCudaMma) return;
  const catalog::Sm90PrefillTile& tile = sm90::prefill_tile(problem);
  plan.tile_m = tile.rows();
  plan.tile_n = tile.tile_keys;
  if (plan.strategy == Strategy::kSplitKv) {
    plan_sm90_ranges(problem, device, *layout, plan);
  } else {
    plan.workspace_bytes = sm90::prefill_workspace_bytes(problem);
  }
  note_bucket(problem, tile.head_dim, tile.smem_bytes(), device, plan);
  if (problem.backend == Backend::kAuto) {
    plan.reasons.push_back(fmt::format(
        "tensors that the copy engine cannot read (rows not 16-byte aligned, a stride of zero{}) run on cuda_mma",
        problem.mode == HeadMode::kInterleaved ? "; in bshd or packed, P other than 2, 4, 8, 16" : ""));
  }
}

void plan_mma_backward(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const catalog::BackwardTile& tile = catalog::backward_tile(bucket_of(problem), device.smem_per_block_bytes);
  plan.tile_m = tile.stream;
  plan.tile_n = tile.resident;
  plan.workspace_bytes = mma::backward_workspace_bytes(problem);
  plan.reasons.emplace_back(problem.deterministic
                                ? "deterministic: dq has a kernel of its own, so nothing is added in random order"
                                : "dq is added up in fp32 by all key tiles");
}

// Of a forward problem for split_d: whether ranges of keys go to blocks of their own.
void plan_key_ranges(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const bool asked = plan.strategy == Strategy::kSplitKv;
  const mma::KeyRangeLayout layout(problem, device);
  const bool useful = plan.strategy == Strategy::kAuto && !problem.packed && layout.in_limits() &&
                      (layout.ranges.count > 1 || layout.heads_are_rows);
  if (!asked && !useful) {
    plan.strategy = Strategy::kSplitD;
    return;
  }
  if (!layout.in_limits()) refuse_ranges(problem, layout.rows, Backend::kCudaMma);
  plan.strategy = Strategy::kSplitKv;
  plan.splits = layout.ranges.count;
  plan.split_size = problem.split_size > 0 ? layout.ranges.keys : 0;
  plan.workspace_bytes = layout.workspace_bytes();
  plan.reasons.push_back(fmt::format("{} range(s) of {} keys by blocks of their own, then merged{}",
                                     layout.ranges.count, layout.ranges.keys,
                                     layout.heads_are_rows ? "; the heads of a key head are rows of a tile" : ""));
}

// Sends a head dim of which no tile fits the device to cuda_naive, or refuses where cuda_mma or split_d was asked for.
void plan_split_d(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const int64_t smem = device.smem_per_block_bytes, dim = larger_head_dim(problem);
  const bool forward = problem.op != Op::kAttentionBackward;
  const catalog::SplitDTile* tile =
      forward ? catalog::split_d_tile(problem.head_dim, problem.head_dim_v, smem) : nullptr;
  const catalog::SplitDBackwardTilePair* backward = forward ? nullptr : catalog::split_d_backward_tile(dim, smem);
  if (tile == nullptr && backward == nullptr) {
    return leave_mma(
        problem,
        {fmt::format("head dims {} and {}", problem.head_dim, problem.head_dim_v),
         fmt::format("tiles of split_d that fit {} KB of shared memory", smem / 1024), "a tile of these head dims"},
        plan);
  }
  plan.reasons.push_back(fmt::format("split_d: a head dim of {} is above {}, so the warps of a block share it out", dim,
                                     catalog::kMmaMaxHeadDim));
  if (forward) {
    plan_key_ranges(problem, device, plan);
    plan.tile_m = tile->rows;
    plan.tile_n = tile->keys;
    note_bucket(problem, tile->out_dim, tile->smem_bytes(problem.head_dim), device, plan);
  } else {
    plan.tile_m = backward->keys.stream;
    plan.tile_n = backward->keys.resident;
    plan.workspace_bytes = mma::split_d_backward_workspace_bytes(problem);
    plan.reasons.emplace_back("dq has a kernel of its own, so nothing is added in random order");
  }
}

// cuda_mma's kernels hold the weights of all heads at once, which the catalog's columns cannot say. Sends what does not
// fit to cuda_naive, or refuses where cuda_mma was asked for.
template <class Problem>
bool mma_serves(const Problem& problem, const DeviceInfo& device, Plan& plan) {
  if (plan.backend != Backend::kCudaMma) return false;
  if (iha::supports(problem, iha::Limits::of(device))) return true;
  leave_mma(
      {problem.backend, Strategy::kAuto, 0},
      {fmt::format("{} heads x {} pseudo-heads of head dim {}", problem.heads, problem.pseudo_heads, problem.head_dim),
       fmt::format("weights and rows of all heads in {} KB of shared memory", device.smem_per_block_bytes / 1024),
       "shared memory for so many"},
      plan);
  return false;
}

// The tensor-core kernels count the rows and keys of a sequence in 32 bits. Sends longer ones to cuda_naive, and what
// only cuda_sm90 cannot count to cuda_mma; or refuses where a backend or a strategy of theirs was asked for.
void send_long_sequences_away(const AttentionProblem& problem, Plan& plan) {
  constexpr int64_t kMostRows = int64_t{1} << 30;
  const int64_t rows = std::max(problem.seqlen_q, problem.seqlen_kv) * problem.rows_per_position();
  if (plan.backend == Backend::kCudaSm90) {
    const int tile_rows = sm90::prefill_tile(problem).rows();
    const double own = static_cast<double>(rows) / tile_rows, batch = static_cast<double>(problem.batch);
    const double tiles = (problem.packed ? own + batch + 1 : batch * (own + 1)) * static_cast<double>(problem.heads_q);
    if (rows > kMostNarrowRows || tiles > INT32_MAX) {
      const Lack lack{fmt::format("{} rows or keys of a head, about {:.0f} row tiles", rows, tiles),
                      fmt::format("{} rows, 2^31 row tiles", kMostNarrowRows), "wider counters"};
      if (problem.backend == Backend::kCudaSm90) return leave_mma(problem, lack, plan);
      plan.backend = Backend::kCudaMma;
      plan.reasons.push_back(fmt::format("not cuda_sm90: {}", lack.required));
    }
  }
  if (plan.backend == Backend::kCudaNaive || rows <= kMostRows) return;
  leave_mma(problem,
            {fmt::format("{} rows or keys of a head", rows), fmt::format("{} of them", kMostRows), "wider counters"},
            plan);
}

// Pages are read by decode alone.
void plan_mma_cache(const AttentionProblem& attention, const DeviceInfo& device, Plan& plan) {
  if (is_split_d(attention)) return plan_split_d(attention, device, plan);
  if (attention.page_size == 0) mma::choose_split(attention, device, plan);
  if (plan.strategy == Strategy::kSplitQ) return plan_mma_forward(attention, device, plan);
  plan.strategy = Strategy::kSplitKv;
  mma::plan_decode(attention, device, plan);
}

}  // namespace

void plan_attention(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const bool forward = problem.op == Op::kAttentionForward, split_d = is_split_d(problem);
  send_long_sequences_away(problem, plan);
  if (plan.backend == Backend::kCudaSm90) plan_sm90_forward(problem, device, plan);
  if (plan.backend == Backend::kCudaMma && split_d) plan_split_d(problem, device, plan);
  if (plan.backend == Backend::kCudaMma && forward && !split_d) mma::choose_split(problem, device, plan);
  if (forward && plan.strategy == Strategy::kAuto) plan.strategy = Strategy::kSplitQ;
  if (plan.backend == Backend::kCudaNaive) {
    plan.tile_m = plan.tile_n = naive::kTile;
    plan.workspace_bytes = forward ? 0 : naive::attention_backward_workspace_bytes(problem);
  } else if (plan.backend == Backend::kCudaMma && !split_d) {
    plan.strategy == Strategy::kSplitKv ? mma::plan_decode(problem, device, plan)
    : forward                           ? plan_mma_forward(problem, device, plan)
                                        : plan_mma_backward(problem, device, plan);
  }
  note_build(plan);
}

void plan_premix(const PremixProblem& problem, const DeviceInfo& device, Plan& plan) {
  const bool backward = problem.op == Op::kPremixBackward;
  if (mma_serves(problem, device, plan)) {
    if (backward) plan.workspace_bytes = iha::premix_backward_workspace_bytes({&problem, 1}, iha::Limits::of(device));
  } else {
    plan.workspace_bytes = naive::premix_workspace_bytes(problem);
  }
  note_build(plan);
}

bool plan_premixes(std::span<const PremixProblem> problems, const DeviceInfo& device, Plan& plan) {
  if (!iha::supports_together(problems, iha::Limits::of(device))) return false;
  if (plan.op == Op::kPremixBackward) {
    plan.workspace_bytes = iha::premix_backward_workspace_bytes(problems, iha::Limits::of(device));
  }
  return true;
}

void plan_collapse(const CollapseProblem& problem, const DeviceInfo& device, Plan& plan) {
  const bool backward = problem.op == Op::kCollapseBackward;
  if (mma_serves(problem, device, plan)) {
    if (backward) plan.workspace_bytes = iha::collapse_backward_workspace_bytes(problem, iha::Limits::of(device));
  } else {
    plan.workspace_bytes = naive::collapse_workspace_bytes(problem);
  }
  note_build(plan);
}

void plan_kvcache(const KvCacheProblem& problem, const DeviceInfo& device, Plan& plan) {
  const AttentionProblem& attention = problem.attention;
  if (plan.backend != Backend::kCudaNaive && problem.raw()) {
    leave_mma(attention, {"raw IHA caches", "mixed IHA caches", "mixing of a cache while it is read"}, plan);
  }
  if (plan.backend == Backend::kCudaSm90) send_long_sequences_away(attention, plan);
  if (plan.backend == Backend::kCudaSm90) plan_sm90_forward(attention, device, plan);
  if (plan.backend == Backend::kCudaMma && mma::cache_served(attention, device, plan)) {
    plan_mma_cache(attention, device, plan);
  }
  if (plan.backend != Backend::kCudaNaive) {
    plan.workspace_bytes += mma::aligned(query_copy_bytes(problem, attention.dtype));
  } else {
    if (plan.strategy == Strategy::kAuto) plan.strategy = Strategy::kSplitQ;
    plan.tile_m = plan.tile_n = naive::kTile;
    plan.workspace_bytes = query_copy_bytes(problem, DType::kFloat32);
  }
  note_build(plan);
}

}  // namespace plait::cuda
