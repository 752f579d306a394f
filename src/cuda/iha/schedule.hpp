// Which blocks work on which jobs, and the workspace of gradients: plain C++, no CUDA call.
// Called by iha.cu and by the planner (plan.cpp).
#pragma once

#include <span>
#include <vector>

#include "cuda/iha/layout.hpp"

namespace plait::cuda::iha {

// Blocks per job, in proportion to its work out of `capacity`: at least one, at most items[j].
inline std::vector<int64_t> share_blocks(std::span<const MixShape> shapes, std::span<const int64_t> items,
                                         int64_t capacity) {
  int64_t total = 0;
  for (const MixShape& s : shapes) total += s.work();
  std::vector<int64_t> blocks;
  for (size_t j = 0; j < shapes.size(); ++j) {
    const double share = static_cast<double>(capacity) * static_cast<double>(shapes[j].work()) /
                         static_cast<double>(std::max<int64_t>(total, 1));
    // A hair is added so that equal thirds of 132 are 44, not 43.
    blocks.push_back(std::min(items[j], std::max<int64_t>(1, static_cast<int64_t>(share + 1e-6))));
  }
  return blocks;
}

// One job of a contract launch: a run of wide rows, a run of narrow ones.
struct ContractJob {
  int job;
  int wide_begin, wide_count, narrow_begin, narrow_count;
  int64_t blocks, partials_offset;  // elements of fp32
};

struct ContractLaunch {
  Products makes;
  ContractLayout layout;
  std::vector<ContractJob> jobs;
};

struct ContractPlan {
  std::vector<ContractLaunch> launches;
  int64_t workspace_bytes = 0;
};

// Adds a launch of `jobs`, whose blocks and offsets it sets; false: does not fit.
inline bool add_launch(ContractPlan& plan, std::span<const MixShape> shapes, Products makes,
                       std::vector<ContractJob> jobs, const Limits& limits) {
  std::vector<MixShape> parts;
  MixShape widest;
  for (const ContractJob& job : jobs) {
    parts.push_back(shapes[static_cast<size_t>(job.job)]);
    parts.back().wide = job.wide_count;
    parts.back().heads = job.narrow_count;
    widest = MixShape::widest(widest, parts.back());
  }
  const auto layout = find_contract_layout(widest, makes, limits.shared_bytes);
  if (!layout) return false;
  std::vector<int64_t> items, chunks;  // a block stays with one chunk of columns
  for (const MixShape& s : parts) {
    chunks.push_back(ceil_div(s.columns.tiles() * kTileElems, layout->columns));
    items.push_back(ceil_div(s.tokens, layout->tokens) * chunks.back());
  }
  const auto blocks = share_blocks(parts, items, limits.multiprocessors);
  for (size_t j = 0; j < jobs.size(); ++j) {
    jobs[j].blocks = std::max(chunks[j], blocks[j] / chunks[j] * chunks[j]);
    jobs[j].partials_offset = plan.workspace_bytes / 4;
    if (makes.gradient)
      plan.workspace_bytes += round_up(jobs[j].blocks * jobs[j].wide_count * jobs[j].narrow_count * 4, 256);
  }
  plan.launches.push_back({makes, *layout, std::move(jobs)});
  return true;
}

// A shape too large for one launch: narrow rows in as few runs as fit, then the gradient in runs of wide rows that
// the registers of one block hold.
inline bool add_runs(ContractPlan& plan, std::span<const MixShape> shapes, int job, Products makes,
                     const Limits& limits) {
  const MixShape& s = shapes[static_cast<size_t>(job)];
  for (int begin = 0, step = s.heads; makes.rows && begin < s.heads;) {
    const int count = std::min(step, s.heads - begin);
    if (add_launch(plan, shapes, {true, false}, {{job, 0, s.wide, begin, count, 0, 0}}, limits)) {
      begin += count;
    } else if (step <= 16) {
      return false;
    } else {
      step = step > 32 ? 32 : 16;
    }
  }
  const int step = contract_max_wide(s.heads);
  for (int begin = 0; makes.gradient && begin < s.wide; begin += step) {
    const int count = std::min(step, s.wide - begin);
    if (!add_launch(plan, shapes, {false, true}, {{job, begin, count, 0, s.heads, 0, 0}}, limits)) return false;
  }
  return true;
}

// How to make `makes` of up to kMaxJobs shapes: one launch for all where that fits.
inline std::optional<ContractPlan> plan_contract(std::span<const MixShape> shapes, Products makes,
                                                 const Limits& limits) {
  std::vector<ContractJob> jobs;
  MixShape widest;  // its heads choose the kernel, whose registers bound the wide rows of every job
  for (size_t j = 0; j < shapes.size(); ++j) {
    jobs.push_back({static_cast<int>(j), 0, shapes[j].wide, 0, shapes[j].heads, 0, 0});
    widest = MixShape::widest(widest, shapes[j]);
  }
  const bool together = !makes.gradient || widest.wide <= contract_max_wide(widest.heads);
  ContractPlan plan;
  if (together && add_launch(plan, shapes, makes, std::move(jobs), limits)) return plan;
  for (size_t j = 0; j < shapes.size(); ++j) {
    if (!add_runs(plan, shapes, static_cast<int>(j), makes, limits)) return std::nullopt;
  }
  return plan;
}

// Collapse per head, backward: blocks per head.
inline int64_t per_head_slices(const MixShape& s, const Limits& limits) {
  constexpr int64_t kBlocksPerMultiprocessor = 4;
  return std::max<int64_t>(
      1, std::min(ceil_div(s.tokens, 16), kBlocksPerMultiprocessor * limits.multiprocessors / std::max(1, s.heads)));
}

inline bool supports_dtype(DType dtype, const Limits& limits) {
  return dtype == DType::kFloat16 || (dtype == DType::kBFloat16 && limits.compute_capability >= 80);
}

// Whether these kernels serve the problem; the rest is cuda_naive's.
inline bool supports(const PremixProblem& problem, const Limits& limits) {
  if (!supports_dtype(problem.dtype, limits) || problem.heads > kMaxHeads) return false;
  const MixShape shape = MixShape::of(problem);
  if (problem.op == Op::kPremixForward) return find_expand_layout(shape, limits.shared_bytes).has_value();
  return plan_contract({&shape, 1}, {true, true}, limits).has_value();
}

// Of problems that are supported each: whether one call takes them all.
inline bool supports_together(std::span<const PremixProblem> problems, const Limits& limits) {
  if (problems.size() > kMaxJobs) return false;
  MixShape widest;
  std::vector<MixShape> shapes;
  for (const PremixProblem& problem : problems) {
    if (problem.dtype != problems[0].dtype || problem.heads == 0) return false;
    shapes.push_back(MixShape::of(problem));
    widest = MixShape::widest(widest, shapes.back());
  }
  if (problems[0].op == Op::kPremixForward) return find_expand_layout(widest, limits.shared_bytes).has_value();
  return plan_contract(shapes, {true, true}, limits).has_value();
}

inline bool supports(const CollapseProblem& problem, const Limits& limits) {
  if (!supports_dtype(problem.dtype, limits) || problem.heads > kMaxHeads) return false;
  const MixShape shape = MixShape::of(problem);
  if (!problem.global) return true;
  if (problem.op == Op::kCollapseForward) return plan_contract({&shape, 1}, {true, false}, limits).has_value();
  return find_expand_layout(shape, limits.shared_bytes) && plan_contract({&shape, 1}, {false, true}, limits);
}

// Workspace, 64-byte aligned, of a backward call over these problems at once (all supported).
inline int64_t premix_backward_workspace_bytes(std::span<const PremixProblem> problems, const Limits& limits) {
  std::vector<MixShape> shapes;
  for (const PremixProblem& p : problems) shapes.push_back(MixShape::of(p));
  return plan_contract(shapes, {true, true}, limits)->workspace_bytes;
}

inline int64_t collapse_backward_workspace_bytes(const CollapseProblem& problem, const Limits& limits) {
  const MixShape shape = MixShape::of(problem);
  if (problem.global) return plan_contract({&shape, 1}, {false, true}, limits)->workspace_bytes;
  return per_head_slices(shape, limits) * shape.wide * 4;
}

}  // namespace plait::cuda::iha
