// Planning of decode: limits, tiles, and a model of its time beside that of prefill.
// Called through plan.hpp.
#include "cuda/mma/decode/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "catalog/mma_tiles.hpp"
#include "cuda/mma/decode/workspace.hpp"
#include "cuda/mma/leave.hpp"
#include "cuda/mma/split_d/ranges.hpp"

namespace plait::cuda::mma {
namespace {

// Clocks of one multiprocessor, from measurements on an H200: what decode costs besides the reading of keys and values,
// kDecodeRest more with more than 16 rows and few keys, which counts only beside cuda_sm90. A prefill block takes so
// long per row, key and column when alone on the multiprocessor, and twice that beside a second block.
constexpr double kDecodeStart = 12000, kClusterStart = 5000, kDecodeRest = 10500;
constexpr double kPrefillClocks = 0.24 / 128, kPrefillStart = 4000;
// With several row tiles, keys come from the L2 cache, and what a tile does with a key takes as long as reading so many
// columns of it (head dim 8, 4096 x 4096: 295 us where reading alone would take 40).
constexpr double kLeastColumns = 128;

constexpr const char* kDecodeLimits =
    "rows and keys of a sequence up to 2^28, steps of keys over all heads and sequences up to 2^31";

// Keys that some row of a sequence sees.
double seen_keys(const AttentionProblem& p) {
  const RowMask mask = RowMask::of(p, p.seqlen_q, p.seqlen_kv);
  const Interval seen = mask.rows(0, mask.row_count());
  return static_cast<double>((seen.hi - seen.lo) * p.joint_passes());
}

// All of them once, by all multiprocessors.
double read_clocks(const AttentionProblem& p, const DeviceInfo& device, double least_columns = 0) {
  const double columns = std::max(static_cast<double>(p.head_dim + p.head_dim_v), least_columns);
  const double bytes = static_cast<double>(p.batch * p.heads_kv) * seen_keys(p) * columns * 2;
  return bytes / kBytesPerClock / device.multiprocessors;
}

double decode_clocks(const AttentionProblem& p, const DeviceInfo& device, const DecodeLayout& layout) {
  return (layout.clusters.any() ? kClusterStart : kDecodeStart) +
         static_cast<double>(layout.row_tiles) * read_clocks(p, device, layout.row_tiles > 1 ? kLeastColumns : 0);
}

// Its last round of blocks reads no faster than the others.
double prefill_clocks(const AttentionProblem& p, const DeviceInfo& device) {
  const catalog::PrefillTile& tile =
      catalog::prefill_tile(catalog::head_dim_bucket(std::max(p.head_dim, p.head_dim_v)), device.smem_per_block_bytes);
  const int64_t blocks = p.batch * p.heads_q * ceil_div(p.seqlen_q * p.rows_per_position(), tile.rows());
  const int64_t at_once = int64_t{device.multiprocessors} * tile.blocks_per_multiprocessor;
  const double block = seen_keys(p) * tile.head_dim * tile.rows() * kPrefillClocks;
  const double rounds = static_cast<double>(ceil_div(blocks, at_once)) * tile.blocks_per_multiprocessor;
  const double products = kPrefillStart + block * (blocks <= device.multiprocessors ? 1.0 : rounds);
  const double filled = static_cast<double>(ceil_div(blocks, at_once) * at_once) / static_cast<double>(blocks);
  return std::max(products, kPrefillStart + filled * read_clocks(p, device));
}

struct Clocks {
  double decode, prefill;
};

// None where there is no choice.
std::optional<Clocks> compare(const AttentionProblem& problem, const DeviceInfo& device) {
  if (problem.packed || problem.heads_kv == 0 || problem.batch == 0) return {};
  const DecodeLayout layout(problem, device);
  if (layout.rows == 0 || layout.keys == 0 || !layout.in_limits(problem)) return {};
  return Clocks{decode_clocks(problem, device, layout), prefill_clocks(problem, device)};
}

}  // namespace

void choose_split(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  if (plan.strategy != Strategy::kAuto) return;
  const std::optional<Clocks> clocks = compare(problem, device);
  if (!clocks) return;
  plan.strategy = clocks->decode < clocks->prefill ? Strategy::kSplitKv : Strategy::kSplitQ;
  plan.reasons.push_back(fmt::format("{}: about {:.0f} thousand clocks over key ranges, {:.0f} over query tiles",
                                     strategy_name(plan.strategy), clocks->decode / 1000, clocks->prefill / 1000));
}

bool split_kv_is_faster(const AttentionProblem& problem, const DeviceInfo& device) {
  const std::optional<Clocks> clocks = compare(problem, device);
  return clocks && clocks->decode < clocks->prefill;
}

double split_kv_clocks(const AttentionProblem& problem, const DeviceInfo& device) {
  const DecodeLayout layout(problem, device);
  if (!layout.in_limits(problem)) return std::numeric_limits<double>::infinity();
  const double clocks = decode_clocks(problem, device, layout);
  if (layout.clusters.any()) return clocks;
  // One block merges a unit's parts.
  const bool many = layout.row_tiles > 1 || layout.choice.size > 0;
  return clocks + (many ? kDecodeRest : 0) +
         kPartRowClocks * static_cast<double>(layout.splits * layout.tile_rows * problem.head_dim_v) / 128;
}

void plan_decode(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  const DecodeLayout layout(problem, device);
  if (!layout.in_limits(problem)) {
    const bool split = problem.split_size > 0;
    AttentionProblem whole = problem;  // one split for each sequence
    whole.split_size = INT64_MAX;
    throw Error(ErrorCode::kUnsupported, split ? "split_size" : "strategy",
                fmt::format("split_kv cannot serve this call. required: {} rows and {} keys of a head. supported by "
                            "cuda_mma: {}. missing: wider counters. way out: {}",
                            layout.rows, layout.keys, kDecodeLimits,
                            !split ? "use strategy auto"
                            : DecodeLayout(whole, device).in_limits(whole)
                                ? "give a larger split_size, or use strategy auto without one"
                                : "use strategy auto without split_size"));
  }
  plan.tile_m = layout.tile.rows();
  plan.tile_n = layout.tile.step_keys;
  plan.splits = layout.splits;
  plan.split_size = layout.split_keys;
  plan.workspace_bytes = layout.workspace_bytes();
  plan.reasons.push_back(
      fmt::format("the {} rows of a key head are {} tile(s) of {}; {} blocks, {} on a multiprocessor", layout.rows,
                  layout.row_tiles, layout.tile.rows(), layout.workers,
                  layout.tile.blocks_per_multiprocessor(device.smem_per_block_bytes)));
  plan.reasons.push_back(
      layout.split_keys > 0 ? fmt::format("{} keys per split: asked for", layout.split_keys)
      : layout.clusters.any()
          ? fmt::format("a key head's keys are shared by {} cluster(s), of {} blocks that merge in shared memory",
                        1 << layout.clusters.clusters_log2, 1 << layout.clusters.blocks_log2)
          : std::string("each block takes an even share of all keys, whatever their lengths"));
}

bool cache_served(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan) {
  if (is_split_d(problem) || DecodeLayout(problem, device).in_limits(problem)) return true;
  leave_mma(problem, {fmt::format("a cache of {} keys", problem.seqlen_kv), kDecodeLimits, "wider counters"}, plan);
  return false;
}

}  // namespace plait::cuda::mma
