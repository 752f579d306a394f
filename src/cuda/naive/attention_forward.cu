// Forward attention on CUDA cores: one block owns 64 softmax rows of one head and up to 128 output columns.
// Called through naive.hpp. Keys are walked in tiles with an online softmax; wide values repeat the scores per column
// block.
#include "cuda/naive/forward.hpp"
#include "cuda/naive/naive.hpp"
#include "cuda/naive/row_tile.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

struct ForwardShared {
  RowTile tile;
  ScoreStage stage;
  alignas(16) float p[kTile][kTilePadded];  // [key][row]
  alignas(16) float values[kStageRows][kColumns];
};

// Softmax state of the thread's rows; the 16 threads of a row hold the same numbers.
struct RowState {
  float max[kPerThread], sum[kPerThread];
};

// Reductions over the 16 threads of a row, which are neighbours.
__device__ float row_max(float value) {
  for (int step = kSide / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
__device__ float row_sum(float value) {
  for (int step = kSide / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Offsets of the keys [key, key_end) and what each row sees of them; returns whether every row sees all. Whole block,
// ends with a barrier.
__device__ bool locate_keys(const AttentionProblem& problem, const AttentionTensors& t, const CacheSource& source,
                            int64_t key, int64_t key_end, int64_t pass, RowTile& tile) {
  bool all = true;
  const int i = threadIdx.x;
  if (i < kTile) {
    const auto offset = [&](const CanonicalTensor& tensor) {
      if (key + i >= key_end) return kNoRow;
      const int64_t head = source.raw ? 0 : tile.kv_head;
      return problem.cached
                 ? cache_row_offset(problem, t.cache, tensor, tile.sequence, head, key + i, pass, source.rows)
                 : key_row_offset(problem, tensor, tile.sequence, head, key + i, pass);
    };
    tile.k[i] = offset(t.k);
    tile.v[i] = offset(t.v);
    all = locate_range(key, key_end, tile);
  }
  return __syncthreads_and(all) != 0;
}

__device__ SourceMix source_mix(const CacheSource& source, const TensorView& w, int64_t kv_head, int64_t pass) {
  if (!source.raw) return {};
  const int64_t at = kv_head * w.stride[0] + pass * w.stride[1];
  return {static_cast<const char*>(w.data) + at * dtype_bytes(w.dtype), w.dtype, w.stride[2], w.shape[2]};
}

// Masks and exponentiates the scores of one key tile into shared P; rescales the accumulators.
__device__ void softmax_tile(const ScoreScale& scale, ForwardShared& s, const float (&product)[kPerThread][kPerThread],
                             RowState& state, float (&acc)[kPerThread][kColumnsPerThread]) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  float p[kPerThread][kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const TileRange range = s.tile.range[kPerThread * ty + i];
    float tile_max = -INFINITY;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int key = kPerThread * tx + j;
      const bool seen = range.holds(key) && s.tile.k[key] != kNoRow;
      p[i][j] = seen ? scale.score(product[i][j]) : -INFINITY;
      tile_max = fmaxf(tile_max, p[i][j]);
    }
    const float max = fmaxf(state.max[i], row_max(tile_max));
    const float base = max == -INFINITY ? 0.0f : max;  // a row that has seen no key yet
    const float factor = expf(state.max[i] - base);
    float tile_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      p[i][j] = expf(p[i][j] - base);
      tile_sum += p[i][j];
    }
    state.sum[i] = state.sum[i] * factor + row_sum(tile_sum);
    state.max[i] = max;
#pragma unroll
    for (float& value : acc[i]) value *= factor;
  }
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    *reinterpret_cast<float4*>(&s.p[kPerThread * tx + j][kPerThread * ty]) =
        make_float4(p[0][j], p[1][j], p[2][j], p[3][j]);
  }
}

// Normalises with the sink and writes the block's columns; the first column block writes the LSE.
__device__ void write_rows(const AttentionProblem& problem, const AttentionTensors& t, const RowTile& tile,
                           const RowState& state, const float (&acc)[kPerThread][kColumnsPerThread]) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  const bool sinks = problem.has_sinks && !tile.sequence.tail;
  const float sink = sinks ? static_cast<const float*>(t.sinks)[tile.head * t.sinks_stride] : -INFINITY;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t row = tile.row_begin + kPerThread * ty + i;
    if (row >= tile.row_end) continue;
    const bool empty = state.sum[i] == 0.0f;  // NaN is not empty
    const float max = fmaxf(state.max[i], sink);
    const float weight = empty ? 0.0f : expf(state.max[i] - max);
    const float sum = (empty ? 0.0f : state.sum[i] * weight) + (sink == max ? 1.0f : expf(sink - max));
    store_row(t.out, query_offset(problem, t.out, tile.sequence, tile.head, row, 0), tile.column, problem.head_dim_v,
              acc[i], empty ? 0.0f : weight / sum);
    if (tile.column == 0 && tx == 0) {
      const float lse = empty && sink == -INFINITY ? -INFINITY : max + logf(sum);
      static_cast<float*>(t.lse.data)[lse_offset(problem, t.lse, tile.sequence, tile.head, row)] = lse;
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ AttentionProblem problem, const __grid_constant__ AttentionTensors t,
                   const __grid_constant__ CacheSource source) {
  __shared__ ForwardShared s;
  RowTile& tile = s.tile;
  const int64_t blocks = column_blocks(problem.head_dim_v);
  if (!locate_rows(problem, t, blockIdx.x / blocks, blockIdx.x % blocks * kColumns, source.rows, tile)) return;
  const ScoreScale scale(problem);
  RowState state;
  float acc[kPerThread][kColumnsPerThread] = {};
  for (int i = 0; i < kPerThread; ++i) state.max[i] = -INFINITY, state.sum[i] = 0.0f;
  for (int64_t pass = 0; pass < problem.joint_passes(); ++pass) {
    if (threadIdx.x < kTile) tile.q[threadIdx.x] = own_row_offset(problem, t.q, tile, pass);
    for (int64_t key = tile.any.lo; key < tile.any.hi; key += kTile) {
      const int64_t key_end = min(key + kTile, tile.any.hi);
      const bool all = locate_keys(problem, t, source, key, key_end, pass, tile);
      float product[kPerThread][kPerThread] = {};
      score_product({t.q, tile.q, {}}, {t.k, tile.k, source_mix(source, source.w_k, tile.kv_head, pass)},
                    problem.head_dim, s.stage, product);
      softmax_tile(scale, s, product, state, acc);
      __syncthreads();
      key_product(s.p, {t.v, tile.v, source_mix(source, source.w_v, tile.kv_head, pass)},
                  static_cast<int>(key_end - key), all, problem.head_dim_v, tile, s.values, acc);
    }
  }
  write_rows(problem, t, tile, state, acc);
}

}  // namespace

void launch_forward(const AttentionProblem& problem, const AttentionTensors& tensors, const CacheSource& source,
                    cudaStream_t stream) {
  const int64_t tiles = tiles_bound(problem, kTile, /*keys=*/false);
  launch(forward_kernel, tiles * problem.heads_q * column_blocks(problem.head_dim_v), kThreads, 0, stream, problem,
         tensors, source);
}

void attention_forward(const AttentionProblem& problem, const AttentionTensors& tensors, cudaStream_t stream) {
  launch_forward(problem, tensors, {}, stream);
}

}  // namespace plait::cuda::naive
