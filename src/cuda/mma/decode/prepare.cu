// Before decode, in one launch: its counters to zero; in a cache step, also before prefill, new keys and values into
// the cache, and queries rotated and mixed into the workspace. Called through decode.hpp.
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
  Arrivals arrivals;
};

__device__ __forceinline__ void run_part(const Part& part, const CacheRows& rows) {
  const int64_t block = blockIdx.x - part.begin;
  if (block < 0 || block >= part.count) return;
  mix_cache_row(part.mix, rows, part.append, block, part.blocks_per_row);
}

__device__ __forceinline__ void clear(const Arrivals& arrivals) {
  for (int64_t i = int64_t{blockIdx.x} * kMixThreads + threadIdx.x; i < arrivals.count;
       i += int64_t{gridDim.x} * kMixThreads) {
    arrivals.data[i] = 0;
  }
}

__global__ void __launch_bounds__(kMixThreads, 3) prepare_kernel(const __grid_constant__ PrepareParams params) {
  ptx::release_next_grid();
  clear(params.arrivals);
  run_part(params.keys, params.rows);
  run_part(params.values, params.rows);
  run_part(params.queries, params.rows);
}

// What only zeroes counters keeps to a small grid.
__global__ void __launch_bounds__(kMixThreads) zero_kernel(const __grid_constant__ Arrivals arrivals) {
  ptx::release_next_grid();
  clear(arrivals);
}

Part part_of(const Mix& mix, bool append, int64_t& blocks) {
  Part part{mix, append, blocks, 0, row_blocks(mix)};
  part.count = mix.batch * mix.seqlen * part.blocks_per_row;
  blocks += part.count;
  return part;
}

}  // namespace

void launch_prepare(const Arrivals& arrivals, Stream stream) {
  if (arrivals.count == 0) return;
  constexpr int64_t kMostBlocks = 64;
  const int64_t blocks = std::clamp(ceil_div(arrivals.count, kMixThreads), int64_t{1}, kMostBlocks);
  launch(zero_kernel, blocks, kMixThreads, 0, stream, arrivals);
}

AttentionTensors prepared_tensors(const KvCacheProblem& p, const KvCacheTensors& t, void* queries) {
  AttentionTensors attention = t.attention;
  if (copies_queries(p)) attention.q = query_copy(p, p.attention.dtype, queries);
  return attention;
}

AttentionTensors launch_prepare(const Arrivals& arrivals, const KvCacheProblem& p, const KvCacheTensors& t,
                                void* queries, Stream stream) {
  const AttentionTensors attention = prepared_tensors(p, t, queries);
  PrepareParams params{};
  int64_t blocks = 0;
  if (p.attention.new_keys > 0) {
    params.keys = part_of(new_keys(p, t), true, blocks);
    params.values = part_of(new_values(p, t), true, blocks);
  }
  if (copies_queries(p)) params.queries = part_of(turned_queries(p, t, attention.q), false, blocks);
  if (blocks == 0) {
    launch_prepare(arrivals, stream);
    return attention;
  }
  params.rows = {p.attention, t.attention.cache, p.cache_rows};
  params.arrivals = arrivals;
  launch(prepare_kernel, blocks, kMixThreads, 0, stream, params);
  return attention;
}

}  // namespace plait::cuda::mma
