// What the premix and collapse kernels are given: jobs of plain data, up to three per launch.
// Called by iha.cu, which fills them, and by the kernels, which take them as __grid_constant__.
#pragma once

#include <cstdint>

#include "cuda/iha/layout.hpp"

namespace plait::cuda::iha {

// A tensor as rows (head, pseudo) of head_dim elements at every token. data null: absent.
struct TokenRows {
  void* data;
  int64_t batch_stride, head_stride, seq_stride, pseudo_stride, dim_stride;
  bool vector;  // every whole tile of eight columns is 16 contiguous, aligned bytes
};

// weight(wide row (head, pseudo), narrow row).
struct WeightMatrix {
  void* data;
  int64_t head_stride, pseudo_stride, narrow_stride;
  bool is_float;  // fp32, else of the dtype of the rows
};

struct RotaryTables {
  const float *cos, *sin;  // [rows, dim / 2]
  int64_t cos_row_stride, cos_pair_stride, sin_row_stride, sin_pair_stride;
  int64_t rows, offset;
  const int32_t* cu_seqlens_other;
  int dim;  // 0: nothing turns
  bool pairs, by_row;
  bool vector;  // four angles of a row are 16 contiguous, aligned bytes
};

// `wide` rows are (head, pseudo), heads * pseudo of them; `narrow` rows are heads.
struct Job {
  TokenRows wide_in, wide_out, narrow_in, narrow_out;
  WeightMatrix weights;
  float* partials;  // [blocks, wide_count, heads]: one share of the weight gradient per block; null: not wanted
  RotaryTables rotary;
  ColumnMap columns;
  const int32_t* cu_seqlens;  // null: dense
  int64_t sequences;          // packed
  int64_t seqlen, tokens;     // tokens = batch * seqlen
  int heads, pseudo;
  int wide_begin, wide_count;   // the wide rows that this job loads (contract)
  int segments;                 // runs of wide rows, each with its own blocks (expand)
  int64_t first_block, blocks;  // blocks per segment
};

template <class Layout>
struct Jobs {
  Job job[kMaxJobs];
  int count;
  bool in_turn;  // every block works on all jobs, one after the other (expand): blocks of a job are all blocks
  Layout layout;
};

// A sum over partials, in order, into a weight gradient.
struct ReduceJob {
  const float* partials;  // [blocks, wide_count, narrow]
  WeightMatrix out;
  int64_t blocks;
  int pseudo, narrow, wide_begin, wide_count;
};

struct ReduceJobs {
  ReduceJob job[kMaxJobs];
  int count;
};

}  // namespace plait::cuda::iha
