// How the CPU backend cuts a problem: strategy, tiles, splits, workers, workspace.
// Called by core/plan.cpp through the registry.
#include <fmt/format.h>

#include "cpu/backward_layout.hpp"
#include "cpu/cpu.hpp"
#include "cpu/forward_layout.hpp"
#include "cpu/mix_layout.hpp"

namespace plait::cpu {
namespace {

// split_kv is chosen below this many lane tiles, and then gives about twice as many tasks.
constexpr int64_t kFewTiles = 32;
constexpr int64_t kMinSplit = 2 * kKeys;

// Depends on the problem alone, never on the workers: a result must not change with the machine's cores.
void choose_split(const AttentionProblem& problem, Plan& plan) {
  const AttentionShape shape(problem);
  const int64_t tiles = std::max<int64_t>(1, lane_tiles_bound(problem) * problem.heads_kv);
  const int64_t keys = problem.seqlen_kv * shape.per;  // packed: of all sequences
  const int64_t typical = problem.packed ? keys / std::max<int64_t>(1, problem.batch) : keys;
  if (plan.strategy == Strategy::kAuto) {
    const bool split = tiles < kFewTiles && typical >= 2 * kMinSplit;
    plan.strategy = split ? Strategy::kSplitKv : Strategy::kSplitQ;
    const bool empty = keys == 0 || lane_tiles_bound(problem) * problem.heads_kv == 0;
    plan.reasons.push_back(
        empty   ? std::string("split_q: no query row or no key, so no score is computed")
        : split ? fmt::format("split_kv: {} tiles of query rows are few beside {} keys", tiles, typical)
                : fmt::format("split_q: {} tiles of query rows by {} keys give enough parallel work", tiles, typical));
  } else {
    plan.reasons.push_back(fmt::format("{}: asked for", strategy_name(plan.strategy)));
  }
  if (plan.strategy != Strategy::kSplitKv) return;
  if (problem.split_size > 0) {
    plan.split_size = std::min(problem.split_size, std::max<int64_t>(1, keys));
    plan.reasons.push_back(fmt::format("{} keys per split: asked for", plan.split_size));
  } else {
    const int64_t ranges = std::clamp<int64_t>(2 * kFewTiles / tiles, 1, std::max<int64_t>(1, typical / kMinSplit));
    plan.split_size = std::max(kKeys, ceil_div(ceil_div(typical, ranges), kKeys) * kKeys);
    plan.reasons.push_back(fmt::format("{} keys per split: about {} tasks", plan.split_size, tiles * ranges));
  }
  plan.splits = std::max<int64_t>(1, ceil_div(keys, plan.split_size));
}

// More workers than tasks would only cost scratch memory.
int32_t workers_for(const DeviceInfo& device, int64_t tasks) {
  return static_cast<int32_t>(std::clamp<int64_t>(tasks, 1, device.workers));
}

void plan_mix(const MixShape& shape, bool backward, const DeviceInfo& device, Plan& plan) {
  const int64_t tasks = backward ? shape.partials() : shape.blocks();
  plan.workers = workers_for(device, tasks);
  plan.tile_m = shape.block_positions();
  plan.workspace_bytes = MixLayout(shape, backward, plan.workers, nullptr).total_bytes;
  plan.reasons.push_back(fmt::format("{} positions per product of {} x {} weights", plan.tile_m, shape.out, shape.in));
  if (backward) plan.reasons.push_back(fmt::format("weight gradient: {} partial sums, added in order", tasks));
}

}  // namespace

void plan_attention(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  plan.tile_m = kLanes;
  plan.tile_n = kKeys;
  const AttentionShape shape(problem);
  if (problem.op == Op::kAttentionForward) {
    choose_split(problem, plan);
    plan.workers = workers_for(device, lane_tiles_bound(problem) * problem.heads_kv * plan.splits);
    const ForwardLayout layout(problem, plan, nullptr);
    plan.workspace_bytes = layout.total_bytes;
    plan.reasons.push_back(fmt::format("a task takes {} tile(s) of {} rows through each packed tile of {} keys",
                                       layout.block_tiles, kLanes, kKeys));
  } else {
    plan.workers = workers_for(device, backward_tasks_bound(problem));
    const BackwardLayout layout(problem, plan, nullptr);
    plan.workspace_bytes = layout.total_bytes;
    plan.reasons.push_back(
        fmt::format("a task owns dk and dv of {} keys; dq is summed in key order, so gradients are "
                    "deterministic",
                    layout.chunk));
  }
  if (shape.group > 1) {
    plan.reasons.push_back(fmt::format("the {} query heads of a key head share its packed keys", shape.group));
  }
}

void plan_premix(const PremixProblem& problem, const DeviceInfo& device, Plan& plan) {
  plan_mix(MixShape::of(problem), problem.op == Op::kPremixBackward, device, plan);
}

void plan_collapse(const CollapseProblem& problem, const DeviceInfo& device, Plan& plan) {
  plan_mix(MixShape::of(problem), problem.op == Op::kCollapseBackward, device, plan);
}

}  // namespace plait::cpu
