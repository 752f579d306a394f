// Premix with RoPE and collapse, forward and backward: a thread per element, and the weight gradient in two stages.
// Called through naive.hpp.
#include <algorithm>

#include "cuda/common/mix.cuh"
#include "cuda/naive/naive.hpp"
#include "cuda/naive/tile.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

constexpr int kElementsPerBlock = 1024;  // of one position

int64_t element_blocks(int rows, int dim) { return (int64_t{rows} * dim + kElementsPerBlock - 1) / kElementsPerBlock; }

// Positions from here on (packed tail) read as zeros. Without sequences all are tail, whatever cu_seqlens[0] says.
__device__ int64_t positions_end(const Mix& m) {
  if (m.cu_seqlens == nullptr) return m.seqlen;
  return m.sequences == 0 ? 0 : clamped(m.cu_seqlens[m.sequences], 0, m.seqlen);
}

// Where position n < positions_end() stands in the rotary tables; -1 in a sequence without keys.
__device__ int64_t rope_position(const Mix& m, int64_t n) {
  if (!m.rope.on) return -1;
  if (m.cu_seqlens == nullptr) return n + m.rope.offset;
  int64_t low = 0, high = m.sequences;  // cu[low] <= n < cu[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (m.cu_seqlens[middle] <= n ? low : high) = middle;
  }
  const int64_t begin = m.cu_seqlens[low], position = n - begin + m.rope.offset;
  if (m.cu_seqlens_other == nullptr) return position;
  const int64_t keys = int64_t{m.cu_seqlens_other[low + 1]} - m.cu_seqlens_other[low];
  return keys == 0 ? -1 : position + keys - (m.cu_seqlens[low + 1] - begin);
}

// Block: one position, kElementsPerBlock elements of y.
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Mix m, int64_t blocks) {
  const int64_t place = blockIdx.x / blocks, batch = place / m.seqlen, n = place % m.seqlen;
  const bool inside = n < positions_end(m);
  const int64_t position = inside ? rope_position(m, n) : -1;
  const int64_t x_base = position_offset(m.x, batch, n), y_base = position_offset(m.y, batch, n);
  const int first = static_cast<int>(blockIdx.x % blocks) * kElementsPerBlock;
  for (int e = first + threadIdx.x; e < min(first + kElementsPerBlock, m.out() * m.dim); e += kThreads) {
    const int out = e / m.dim, d = e % m.dim;
    const float value = inside ? mixed(m, x_base, position, out, d) : 0.0f;
    store(m.y.data, m.y.dtype, y_base + head_offset(m.y, m.y_pseudo, out) + d * m.y.dim_stride, value);
  }
}

// Dim d of dx[in]: m.x is dx, m.y is dy.
__device__ float unmixed(const Mix& m, int64_t y_base, int64_t position, int in, int d) {
  const int first = m.per_head ? in / m.x_pseudo * m.y_pseudo : 0, end = m.per_head ? first + m.y_pseudo : m.out();
  Turn turn = turn_of(m, position, 0, d, -1.0f);
  float sum = 0.0f;
  for (int out = first; out < end; ++out) {
    if (m.rope.rows) turn = turn_of(m, position, out % m.y_pseudo, d, -1.0f);
    sum = fmaf(weight(m, out, in), turned(m.y, y_base + head_offset(m.y, m.y_pseudo, out), d, turn), sum);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Mix m, int64_t blocks) {
  const int64_t place = blockIdx.x / blocks, batch = place / m.seqlen, n = place % m.seqlen;
  const bool inside = n < positions_end(m);
  const int64_t position = inside ? rope_position(m, n) : -1;
  const int64_t x_base = position_offset(m.x, batch, n), y_base = position_offset(m.y, batch, n);
  const int first = static_cast<int>(blockIdx.x % blocks) * kElementsPerBlock;
  for (int e = first + threadIdx.x; e < min(first + kElementsPerBlock, m.in() * m.dim); e += kThreads) {
    const int in = e / m.dim, d = e % m.dim;
    const float value = inside ? unmixed(m, y_base, position, in, d) : 0.0f;
    store(m.x.data, m.x.dtype, x_base + head_offset(m.x, m.x_pseudo, in) + d * m.x.dim_stride, value);
  }
}

// Rows first .. first + 63 of `count` at a position; dims begin .. begin + kDepth, turned; zero outside.
__device__ void stage_turned(const Mix& m, const CanonicalTensor& t, int pseudo, int first, int count, int64_t base,
                             int64_t position, bool turns, float direction, int begin, float (*to)[kTilePadded]) {
  const int d = begin + threadIdx.x % kDepth;
#pragma unroll
  for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
    const int row = threadIdx.x / kDepth + i * (kThreads / kDepth), index = first + row;
    float value = 0.0f;
    if (index < count && d < m.dim) {
      const Turn turn = turns ? turn_of(m, position, index % m.y_pseudo, d, direction) : Turn{};
      value = turned(t, base + head_offset(t, pseudo, index), d, turn);
    }
    to[threadIdx.x % kDepth][row] = value;
  }
}

// partial[chunk][out][in] = sum over the chunk's positions of dy x: m.y is dy. The table row of a position turns x, the
// row of a pseudo-head turns dy back.
__global__ void __launch_bounds__(kThreads, 2)
    weight_kernel(const __grid_constant__ Mix m, const __grid_constant__ WeightGrid grid, float* partial) {
  __shared__ ScoreStage stage;
  const int out_first = static_cast<int>(blockIdx.x % grid.out_tiles) * kTile;
  const int in_first = static_cast<int>(blockIdx.x / grid.out_tiles % grid.in_tiles) * kTile;
  const int64_t chunk = blockIdx.x / (grid.out_tiles * grid.in_tiles);
  const int64_t begin = grid.positions * chunk / grid.chunks, end = grid.positions * (chunk + 1) / grid.chunks;
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  float acc[kPerThread][kPerThread] = {};
  for (int64_t place = begin; place < end; ++place) {
    const int64_t batch = place / m.seqlen, n = place % m.seqlen;
    if (n >= positions_end(m)) continue;
    const int64_t position = rope_position(m, n);
    for (int d = 0; d < m.dim; d += kDepth) {
      stage_turned(m, m.y, m.y_pseudo, out_first, m.out(), position_offset(m.y, batch, n), position, m.rope.rows, -1.0f,
                   d, stage.left);
      stage_turned(m, m.x, m.x_pseudo, in_first, m.in(), position_offset(m.x, batch, n), position, !m.rope.rows, 1.0f,
                   d, stage.right);
      __syncthreads();
      depth_product(stage, acc);
      __syncthreads();
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t out = out_first + kPerThread * ty + i, in = in_first + kPerThread * tx + j;
      if (out < m.out() && in < m.in()) partial[(chunk * m.out() + out) * m.in() + in] = acc[i][j];
    }
  }
}

// Adds the partial sums in the order of the chunks.
__global__ void __launch_bounds__(kThreads)
    weight_sum_kernel(const __grid_constant__ Mix m, const __grid_constant__ MixWeights dw, int64_t chunks,
                      const float* partial) {
  const int64_t e = int64_t{blockIdx.x} * kThreads + threadIdx.x, size = int64_t{m.out()} * m.in();
  if (e >= size) return;
  const int out = static_cast<int>(e / m.in()), in = static_cast<int>(e % m.in());
  if (m.per_head && out / m.y_pseudo != in / m.x_pseudo) return;
  double sum = 0.0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * size + e];
  store(dw.data, dw.dtype, weight_offset(m, dw, out, in), static_cast<float>(sum));
}

void run_forward(Mix m, const CanonicalTensor& x, const CanonicalTensor& y, cudaStream_t stream) {
  m.x = x, m.y = y;
  const int64_t blocks = element_blocks(m.out(), m.dim);
  launch(forward_kernel, m.batch * m.seqlen * blocks, kThreads, 0, stream, m, blocks);
}

void run_backward(Mix m, const CanonicalTensor& x, const CanonicalTensor& dy, const CanonicalTensor& dx,
                  const MixWeights& dw, void* workspace, cudaStream_t stream) {
  m.x = dx, m.y = dy;
  const int64_t blocks = element_blocks(m.in(), m.dim);
  launch(backward_kernel, m.batch * m.seqlen * blocks, kThreads, 0, stream, m, blocks);
  m.x = x;
  const WeightGrid grid(m.out(), m.in(), m.batch * m.seqlen);
  auto* partial = static_cast<float*>(workspace);
  launch(weight_kernel, grid.blocks(), kThreads, 0, stream, m, grid, partial);
  const int64_t weights = int64_t{m.out()} * m.in();
  launch(weight_sum_kernel, (weights + kThreads - 1) / kThreads, kThreads, 0, stream, m, dw, grid.chunks, partial);
}

MixWeights premix_weights(const TensorView& w) { return {w.data, w.dtype, w.stride[0], w.stride[1], w.stride[2], 0}; }
MixWeights collapse_weights(const TensorView& r, bool global) {
  return global ? MixWeights{r.data, r.dtype, r.stride[0], 0, r.stride[1], r.stride[2]}
                : MixWeights{r.data, r.dtype, r.stride[0], 0, 0, r.stride[1]};
}

Mix mix_of(const PremixProblem& p) {
  Mix m;
  m.batch = p.packed ? 1 : p.batch, m.seqlen = p.seqlen;
  m.heads = static_cast<int>(p.heads), m.y_pseudo = static_cast<int>(p.pseudo_heads);
  m.dim = static_cast<int>(p.head_dim);
  return m;
}
Mix mix_of(const PremixProblem& p, const PremixTensors& t) {
  Mix m = mix_of(p);
  m.w = premix_weights(t.w);
  if (p.packed) m.cu_seqlens = t.cu_seqlens, m.cu_seqlens_other = t.cu_seqlens_other, m.sequences = p.batch;
  if (!p.has_rope) return m;
  m.rope = {true,
            p.rope_index == RopeIndex::kRow,
            p.rope_style == RopeStyle::kPairs,
            static_cast<int>(p.rope_dim / 2),
            p.rope_rows,
            p.rope_offset,
            t.cos,
            t.sin};
  return m;
}

Mix mix_of(const CollapseProblem& p) {
  Mix m;
  m.batch = p.batch, m.seqlen = p.seqlen;
  m.heads = static_cast<int>(p.heads), m.x_pseudo = static_cast<int>(p.pseudo_heads);
  m.dim = static_cast<int>(p.head_dim);
  m.per_head = !p.global;
  return m;
}
Mix mix_of(const CollapseProblem& p, const CollapseTensors& t) {
  Mix m = mix_of(p);
  m.w = collapse_weights(t.r, p.global);
  return m;
}

}  // namespace

void premix_forward(const PremixProblem& problem, const PremixTensors& t, cudaStream_t stream) {
  run_forward(mix_of(problem, t), t.x, t.y, stream);
}
void premix_backward(const PremixProblem& problem, const PremixTensors& t, void* workspace, cudaStream_t stream) {
  run_backward(mix_of(problem, t), t.x, t.dy, t.dx, premix_weights(t.dw), workspace, stream);
}
void collapse_forward(const CollapseProblem& problem, const CollapseTensors& t, cudaStream_t stream) {
  run_forward(mix_of(problem, t), t.x, t.y, stream);
}
void collapse_backward(const CollapseProblem& problem, const CollapseTensors& t, void* workspace, cudaStream_t stream) {
  run_backward(mix_of(problem, t), t.x, t.dy, t.dx, collapse_weights(t.dr, problem.global), workspace, stream);
}

}  // namespace plait::cuda::naive
