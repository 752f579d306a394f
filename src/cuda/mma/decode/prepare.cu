// Before decode, in one launch: its counters to zero; in a cache step also new keys and values into the cache, and
// queries rotated and mixed into the workspace. Called through decode.hpp.
#include "cuda/common/cache_mix.cuh"
#include "cuda/mma/decode/decode.hpp"
#include "cuda/ptx/grid.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {
namespace {

// Rows that blocks [begin, begin + count) of the launch write.
struct Part {
  Mix mix;
  bool append = false;
  int64_t begin = 0, count = 0, blocks_per_row = 1;
};

struct PrepareParams {
  Part keys, values, queries;
  CacheRows rows;
  int* arrivals;
  int64_t arrival_count;
};

__device__ __forceinline__ void run_part(const Part& part, const CacheRows& rows) {
  const int64_t block = blockIdx.x - part.begin;
  if (block < 0 || block >= part.count) return;
  mix_cache_row(part.mix, rows, part.append, block, part.blocks_per_row);
}

__global__ void __launch_bounds__(kMixThreads, 3) prepare_kernel(const __grid_constant__ PrepareParams params) {
  ptx::release_next_grid();
  for (int64_t i = int64_t{blockIdx.x} * kMixThreads + threadIdx.x; i < params.arrival_count;
       i += int64_t{gridDim.x} * kMixThreads) {
    params.arrivals[i] = 0;
  }
  run_part(params.keys, params.rows);
  run_part(params.values, params.rows);
  run_part(params.queries, params.rows);
}

// What only zeroes counters keeps to a small grid.
__global__ void __launch_bounds__(kMixThreads) zero_kernel(int* arrivals, int64_t count) {
  ptx::release_next_grid();
  for (int64_t i = int64_t{blockIdx.x} * kMixThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kMixThreads) {
    arrivals[i] = 0;
  }
}

int* arrivals_of(const DecodeLayout& layout, void* workspace) {
  return reinterpret_cast<int*>(static_cast<char*>(workspace) + layout.out_bytes + layout.stats_bytes);
}

Part part_of(const Mix& mix, bool append, int64_t& blocks) {
  Part part{mix, append, blocks, 0, row_blocks(mix)};
  part.count = mix.batch * mix.seqlen * part.blocks_per_row;
  blocks += part.count;
  return part;
}

}  // namespace

AttentionTensors launch_prepare(const DecodeLayout& layout, const AttentionTensors& tensors, void* workspace,
                                Stream stream) {
  constexpr int64_t kMostBlocks = 64;
  const int64_t blocks = std::clamp(ceil_div(layout.arrivals, kMixThreads), int64_t{1}, kMostBlocks);
  launch(zero_kernel, blocks, kMixThreads, 0, stream, arrivals_of(layout, workspace), layout.arrivals);
  return tensors;
}

AttentionTensors launch_prepare(const DecodeLayout& layout, const KvCacheProblem& p, const KvCacheTensors& t,
                                void* workspace, Stream stream) {
  AttentionTensors attention = t.attention;
  PrepareParams params{};
  int64_t blocks = 0;
  if (p.attention.new_keys > 0) {
    params.keys = part_of(new_keys(p, t), true, blocks);
    params.values = part_of(new_values(p, t), true, blocks);
  }
  if (copies_queries(p)) {
    attention.q = query_copy(p, p.attention.dtype, static_cast<char*>(workspace) + layout.workspace_bytes());
    params.queries = part_of(turned_queries(p, t, attention.q), false, blocks);
  }
  if (blocks == 0) return launch_prepare(layout, attention, workspace, stream);
  params.rows = {p.attention, t.attention.cache, p.cache_rows};
  params.arrivals = arrivals_of(layout, workspace);
  params.arrival_count = layout.arrivals;
  launch(prepare_kernel, blocks, kMixThreads, 0, stream, params);
  return attention;
}

}  // namespace plait::cuda::mma
