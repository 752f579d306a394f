// The key half of the backward: one block owns 64 keys of one key head and up to 128 columns of dk or of dv.
// Called by attention_backward.cu. It walks the query heads of its group and the row tiles that see its keys, in a
// fixed order: deterministic, and each element of dk and dv is written once.
#include "cuda/naive/backward.hpp"
#include "cuda/naive/tile.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

// The keys of a block, and the row tile that it meets.
struct KeyTile {
  DeviceSequence sequence;
  int64_t kv_head, key_begin, key_end, row_begin, row_end, column;  // rows: that see a key of the tile
  int64_t k[kTile], v[kTile], q[kTile], dout[kTile];                // element offsets
  TileRange range[kTile];                                           // keys of each row of the row tile
  float lse[kTile], delta[kTile];
};

struct DkDvShared {
  KeyTile tile;
  ScoreStage stage;
  alignas(16) float weights[kTile][kTilePadded];  // P or dS, [row][key]
  alignas(16) float values[kStageRows][kColumns];
};

// The first of the rows 0 .. rows - 1 of which `holds` is true; it stays true from there on.
template <class Holds>
__device__ int64_t first_row(int64_t rows, Holds holds) {
  int64_t low = 0, high = rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (holds(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Fills what does not depend on the row tile; false: the block has nothing to do. Whole block, ends with a barrier.
__device__ bool locate_block(const AttentionProblem& p, const AttentionTensors& t, int64_t index, int64_t pass,
                             int64_t column, KeyTile& tile) {
  const TileOfSequence at = find_tile(p, t, index / p.heads_kv, kTile, /*keys=*/true);
  if (at.sequence < 0) return false;
  const DeviceSequence sequence = device_sequence(p, t, at.sequence);
  const RowMask mask = RowMask::of(p, sequence.q_len, sequence.kv_len);
  const int64_t begin = at.tile * kTile, end = min(begin + kTile, mask.key_count()), kv_head = index % p.heads_kv;
  if (threadIdx.x == 0) {
    tile.sequence = sequence;
    tile.kv_head = kv_head, tile.key_begin = begin, tile.key_end = end, tile.column = column;
    // The limits of a row never decrease from row to row.
    const int64_t rows = sequence.tail ? 0 : mask.row_count();
    tile.row_begin = first_row(rows, [&](int64_t row) { return mask.row(row).hi > begin; });
    tile.row_end = first_row(rows, [&](int64_t row) { return mask.row(row).lo >= end; });
  }
  if (threadIdx.x < kTile) {
    const int64_t key = begin + threadIdx.x;
    tile.k[threadIdx.x] = key < end ? key_row_offset(p, t.k, sequence, kv_head, key, pass) : kNoRow;
    tile.v[threadIdx.x] = key < end ? key_row_offset(p, t.v, sequence, kv_head, key, pass) : kNoRow;
  }
  __syncthreads();
  return true;
}

// Offsets, LSE, delta and ranges of the rows row .. row + 63; returns whether every row sees every key. Whole block,
// ends with a barrier.
__device__ bool locate_row_tile(const AttentionProblem& p, const AttentionTensors& t, const float* delta, int64_t head,
                                int64_t pass, int64_t row_begin, KeyTile& tile) {
  bool all = true;
  const int i = threadIdx.x;
  if (i < kTile) {
    const int64_t row = row_begin + i;
    tile.q[i] = tile.dout[i] = kNoRow;
    tile.range[i] = {0, 0};
    tile.lse[i] = tile.delta[i] = 0.0f;
    if (row < tile.row_end) {
      const RowMask mask = RowMask::of(p, tile.sequence.q_len, tile.sequence.kv_len);
      const Interval seen = mask.row(row);
      const float lse = static_cast<const float*>(t.lse.data)[lse_offset(p, t.lse, tile.sequence, head, row)];
      tile.q[i] = query_offset(p, t.q, tile.sequence, head, row, pass);
      tile.dout[i] = query_offset(p, t.dout, tile.sequence, head, row, 0);
      tile.lse[i] = lse;
      tile.delta[i] = delta[delta_offset(p, tile.sequence, head, row)];
      if (lse != -INFINITY) tile.range[i] = tile_range(seen.lo, seen.hi, tile.key_begin);  // else: no softmax
      all = lse != -INFINITY && seen.lo <= tile.key_begin && tile.key_end <= seen.hi;
    }
  }
  return __syncthreads_and(all) != 0;
}

enum class Gradient { kKeys, kValues };

// P (for dv) or dS (for dk) of the thread's pairs, zero where a row does not see a key.
__device__ void weight_tile(const ScoreScale& scale, Gradient which, const float (&product)[kPerThread][kPerThread],
                            const float (&dp)[kPerThread][kPerThread], DkDvShared& s) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int row = kPerThread * tx + j;
    const TileRange range = s.tile.range[row];
    float weights[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float score = scale.score(product[i][j]), p = expf(score - s.tile.lse[row]);
      const float value = which == Gradient::kValues ? p : p * (dp[i][j] - s.tile.delta[row]) * scale.slope(score);
      weights[i] = range.holds(kPerThread * ty + i) ? value : 0.0f;
    }
    *reinterpret_cast<float4*>(&s.weights[row][kPerThread * ty]) =
        make_float4(weights[0], weights[1], weights[2], weights[3]);
  }
}

// acc += weights^T rows: rows of dout (dv) or of q (dk).
__device__ void row_product(const RowSet& rows, int count, bool all, int64_t dim, DkDvShared& s,
                            float (&acc)[kPerThread][kColumnsPerThread]) {
  if (all) {
    output_product(s.weights, rows, count, s.tile.column, dim, s.values, [](int, int) { return true; }, acc);
  } else {
    const TileRange* range = s.tile.range;
    const int key = kPerThread * (threadIdx.x / kSide);
    output_product(
        s.weights, rows, count, s.tile.column, dim, s.values,
        [range, key](int row, int i) { return range[row].holds(key + i); }, acc);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    dkdv_kernel(const __grid_constant__ AttentionProblem problem, const __grid_constant__ AttentionTensors t,
                const float* delta) {
  __shared__ DkDvShared s;
  KeyTile& tile = s.tile;
  const int64_t key_blocks = column_blocks(problem.head_dim), blocks = key_blocks + column_blocks(problem.head_dim_v);
  const int64_t block = blockIdx.x % blocks, pass = blockIdx.x / blocks % problem.joint_passes();
  const Gradient which = block < key_blocks ? Gradient::kKeys : Gradient::kValues;
  const int64_t column = (which == Gradient::kKeys ? block : block - key_blocks) * kColumns;
  if (!locate_block(problem, t, blockIdx.x / (blocks * problem.joint_passes()), pass, column, tile)) return;
  const ScoreScale scale(problem);
  const int64_t group = problem.heads_q / problem.heads_kv;
  float acc[kPerThread][kColumnsPerThread] = {};
  for (int64_t head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
    for (int64_t row = tile.row_begin; row < tile.row_end; row += kTile) {
      const bool all = locate_row_tile(problem, t, delta, head, pass, row, tile);
      const int rows = static_cast<int>(min(int64_t{kTile}, tile.row_end - row));
      float product[kPerThread][kPerThread] = {}, dp[kPerThread][kPerThread] = {};
      score_product({t.k, tile.k, {}}, {t.q, tile.q, {}}, problem.head_dim, s.stage, product);
      if (which == Gradient::kKeys) {
        score_product({t.v, tile.v, {}}, {t.dout, tile.dout, {}}, problem.head_dim_v, s.stage, dp);
      }
      weight_tile(scale, which, product, dp, s);
      __syncthreads();
      if (which == Gradient::kKeys) {
        row_product({t.q, tile.q, {}}, rows, all, problem.head_dim, s, acc);
      } else {
        row_product({t.dout, tile.dout, {}}, rows, all, problem.head_dim_v, s, acc);
      }
    }
  }
  const CanonicalTensor& to = which == Gradient::kKeys ? t.dk : t.dv;
  const int64_t dim = which == Gradient::kKeys ? problem.head_dim : problem.head_dim_v;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t key = tile.key_begin + kPerThread * (threadIdx.x / kSide) + i;
    if (key >= tile.key_end) continue;
    store_row(to, key_row_offset(problem, to, tile.sequence, tile.kv_head, key, pass), tile.column, dim, acc[i], 1.0f);
  }
}

}  // namespace

void launch_dkdv(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
                 cudaStream_t stream) {
  const int64_t tiles = tiles_bound(problem, kTile, /*keys=*/true) * problem.heads_kv * problem.joint_passes();
  launch(dkdv_kernel, tiles * (column_blocks(problem.head_dim) + column_blocks(problem.head_dim_v)), kThreads, 0,
         stream, problem, tensors, delta);
}

}  // namespace plait::cuda::naive
