// The query half of the backward: one block owns 64 softmax rows of one head and up to 128 columns of dq.
// Called by attention_backward.cu. S and dP are recomputed per key tile; each element of dq is written once.
#include "cuda/naive/backward.hpp"
#include "cuda/naive/row_tile.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

struct DqShared {
  RowTile tile;
  int64_t dout[kTile];
  float lse[kTile], delta[kTile];
  ScoreStage stage;
  alignas(16) float ds[kTile][kTilePadded];  // [key][row]
  alignas(16) float values[kStageRows][kColumns];
};

// LSE and delta of the thread's row; a row without softmax (LSE -inf) sees nothing. The first kTile threads.
__device__ void load_row(const AttentionProblem& problem, const AttentionTensors& t, const float* delta, int64_t pass,
                         DqShared& s) {
  RowTile& tile = s.tile;
  const int i = threadIdx.x;
  const int64_t row = tile.row_begin + i;
  tile.q[i] = own_row_offset(problem, t.q, tile, pass);
  s.dout[i] = own_row_offset(problem, t.dout, tile, 0);
  s.lse[i] = s.delta[i] = 0.0f;
  if (row >= tile.row_end) return;
  s.lse[i] = static_cast<const float*>(t.lse.data)[lse_offset(problem, t.lse, tile.sequence, tile.head, row)];
  s.delta[i] = delta[delta_offset(problem, tile.sequence, tile.head, row)];
  if (s.lse[i] == -INFINITY) tile.seen[i] = {0, 0};
}

// dS of the thread's pairs, zero where a row does not see a key.
__device__ void gradient_tile(const ScoreScale& scale, const float (&product)[kPerThread][kPerThread],
                              const float (&dp)[kPerThread][kPerThread], DqShared& s) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int key = kPerThread * tx + j;
    float ds[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int row = kPerThread * ty + i;
      const float score = scale.score(product[i][j]);
      const float value = expf(score - s.lse[row]) * (dp[i][j] - s.delta[row]) * scale.slope(score);
      ds[i] = s.tile.range[row].holds(key) ? value : 0.0f;
    }
    *reinterpret_cast<float4*>(&s.ds[key][kPerThread * ty]) = make_float4(ds[0], ds[1], ds[2], ds[3]);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    dq_kernel(const __grid_constant__ AttentionProblem problem, const __grid_constant__ AttentionTensors t,
              const float* delta) {
  __shared__ DqShared s;
  RowTile& tile = s.tile;
  const int64_t blocks = column_blocks(problem.head_dim), pass = blockIdx.x / blocks % problem.joint_passes();
  const int64_t index = blockIdx.x / (blocks * problem.joint_passes());
  if (!locate_rows(problem, t, index, blockIdx.x % blocks * kColumns, 0, tile)) return;
  if (threadIdx.x < kTile) load_row(problem, t, delta, pass, s);
  const ScoreScale scale(problem);
  float acc[kPerThread][kColumnsPerThread] = {};
  for (int64_t key = tile.any.lo; key < tile.any.hi; key += kTile) {
    const int64_t key_end = min(key + kTile, tile.any.hi);
    bool all = true;
    if (threadIdx.x < kTile) {
      const bool inside = key + threadIdx.x < key_end;
      const auto offset = [&](const CanonicalTensor& k) {
        return inside ? key_row_offset(problem, k, tile.sequence, tile.kv_head, key + threadIdx.x, pass) : kNoRow;
      };
      tile.k[threadIdx.x] = offset(t.k);
      tile.v[threadIdx.x] = offset(t.v);
      all = locate_range(key, key_end, tile);
    }
    all = __syncthreads_and(all) != 0;
    float product[kPerThread][kPerThread] = {}, dp[kPerThread][kPerThread] = {};
    score_product({t.q, tile.q, {}}, {t.k, tile.k, {}}, problem.head_dim, s.stage, product);
    score_product({t.dout, s.dout, {}}, {t.v, tile.v, {}}, problem.head_dim_v, s.stage, dp);
    gradient_tile(scale, product, dp, s);
    __syncthreads();
    key_product(s.ds, {t.k, tile.k, {}}, static_cast<int>(key_end - key), all, problem.head_dim, tile, s.values, acc);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t row = tile.row_begin + kPerThread * (threadIdx.x / kSide) + i;
    if (row >= tile.row_end) continue;
    store_row(t.dq, query_offset(problem, t.dq, tile.sequence, tile.head, row, pass), tile.column, problem.head_dim,
              acc[i], 1.0f);
  }
}

}  // namespace

void launch_dq(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
               cudaStream_t stream) {
  const int64_t tiles = tiles_bound(problem, kTile, /*keys=*/false) * problem.heads_q * problem.joint_passes();
  launch(dq_kernel, tiles * column_blocks(problem.head_dim), kThreads, 0, stream, problem, tensors, delta);
}

}  // namespace plait::cuda::naive
