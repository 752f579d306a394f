// The attention problem that explain, check and bench take from the command line.
// Called by those commands.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "plait/attention.hpp"

namespace plait::cli {

// One of the tensors of an attention call, by the shape that it has.
enum class Slot { kQuery, kKey, kValue, kOut, kLse, kSinks, kCuQuery, kCuKey };

struct Problem {
  int64_t batch = 1, heads = 8, seqlen_q = 1024, head_dim = 64, pseudo_heads = 1, workers = 0;
  std::optional<int64_t> heads_kv, seqlen_kv, head_dim_v;  // as the query's
  DType dtype = DType::kFloat32;
  AttentionOptions options;
  bool sinks = false;
  bool packed = false;  // `batch` sequences of equal length
  std::string device = "cpu";

  int64_t kv_heads() const { return heads_kv.value_or(heads); }
  int64_t kv_length() const { return seqlen_kv.value_or(seqlen_q); }
  int64_t value_dim() const { return head_dim_v.value_or(head_dim); }
  bool interleaved() const { return options.mode == HeadMode::kInterleaved; }
  bool pseudo() const { return options.mode != HeadMode::kPlain; }
  // Softmax rows and keys of one sequence, in virtual rows where the mode has them.
  int64_t rows() const { return seqlen_q * (interleaved() ? pseudo_heads : 1); }
  int64_t keys() const { return kv_length() * (interleaved() ? pseudo_heads : 1); }
  int64_t passes() const { return options.mode == HeadMode::kJoint ? pseudo_heads : 1; }

  DeviceInfo device_info() const;
  int32_t gpu_index() const;  // N of device "cuda:N", 0 of "cuda"
  // The view of a tensor of this problem at `data`, contiguous in the problem's layout.
  TensorView view(Slot slot, void* data, DType slot_dtype) const;
  // Keys [lo, hi) that softmax row `row` sees; the mask written down once more, apart from the library's.
  std::pair<int64_t, int64_t> interval(int64_t row) const;
  // (row, key) pairs under the mask, over the whole batch and all query heads.
  double visible_pairs() const;
  std::string describe() const;  // "plain bfloat16, q [1, 8, 1024, 64], k [...], v [...], causal"
};

// Adds every option of the problem; `finish` must run after parsing.
void add_problem_options(CLI::App& app, Problem& problem);
// --device for commands that run something: cpu, cuda or cuda:N.
void add_run_device(CLI::App& app, Problem& problem);
// Checks what only the command line can get wrong (a P without a mode, sizes that overflow).
void finish_problem(const Problem& problem);

}  // namespace plait::cli
