// One step over a cache: append the new keys in place, rotate and mix (IHA), then the attention of
// attention_forward.cu. Called through naive.hpp. Raw IHA caches are mixed as the attention reads them, so no step
// needs memory per key.
#include "cuda/common/cache_mix.cuh"
#include "cuda/naive/forward.hpp"
#include "cuda/naive/naive.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

__global__ void __launch_bounds__(kMixThreads, 3)
    cache_mix_kernel(const __grid_constant__ Mix m, const __grid_constant__ CacheRows rows, bool append,
                     int64_t blocks) {
  mix_cache_row(m, rows, append, blockIdx.x, blocks);
}

void run_mix(const KvCacheProblem& p, const KvCacheTensors& t, const Mix& m, bool append, cudaStream_t stream) {
  const int64_t blocks = row_blocks(m);
  launch(cache_mix_kernel, m.batch * m.seqlen * blocks, kMixThreads, 0, stream, m,
         CacheRows{p.attention, t.attention.cache, p.cache_rows}, append, blocks);
}

}  // namespace

void attention_with_kvcache(const KvCacheProblem& p, const KvCacheTensors& t, void* workspace, cudaStream_t stream) {
  AttentionTensors attention = t.attention;
  if (copies_queries(p)) {
    attention.q = query_copy(p, DType::kFloat32, workspace);
    run_mix(p, t, turned_queries(p, t, attention.q), false, stream);
  }
  if (p.attention.new_keys > 0) {
    run_mix(p, t, new_keys(p, t), true, stream);
    run_mix(p, t, new_values(p, t), true, stream);
  }
  CacheSource source;
  source.rows = p.cache_rows;
  source.raw = p.raw();
  if (source.raw) source.w_k = t.w_k, source.w_v = t.w_v;
  launch_forward(p.attention, attention, source, stream);
}

}  // namespace plait::cuda::naive
