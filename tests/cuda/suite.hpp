// What the CUDA tests share: the command line, the backends of the GPU, cases run by all host threads, accuracy bars.
// Called by tests/cuda/*_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/calls.hpp"
#include "support/device_mirror.hpp"

namespace plait::testing {

// The command line beside GoogleTest's.
struct Settings {
  uint64_t seed = 1;     // of the first random problem
  int64_t cases = 600;   // random problems
  double seconds = 40;   // after which no further random problem starts
  int64_t smem_kib = 0;  // shared memory per block of the GPU that is planned for; 0: of the one that is there
  bool large = false;    // also tensors of more than 2^31 elements (needs 40 GB on the device)
  bool exact = false;    // no guards around tensors, one host thread: for compute-sanitizer
};
Settings& settings();

const CudaTarget& naive();
const CudaTarget& mma();
const CudaTarget& sm90();       // forward only
const CudaTarget& automatic();  // the backend that the planner takes
// Whether tensor cores take the problem; cuda_naive takes everything.
bool tensor_cores_take(DType dtype, int64_t head_dim, int64_t head_dim_v);

// A dtype of 16 bits that tensor cores take in this build.
DType half_dtype();

// Runs body(0) ... body(count - 1) on all cores and reports what they throw as test failures, by name(i).
void in_parallel(int64_t count, const std::function<void(int64_t)>& body,
                 const std::function<std::string(int64_t)>& name);

double rms(const std::vector<double>& x);
// Root-mean-square error within `bar` times the root-mean-square of what is expected (at least `floor`); equal
// infinities match, a NaN never does.
void expect_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected,
                  double bar, double floor);
void expect_equal(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected);
// Every element of a tensor written, and nothing beside them.
void expect_all_written(const std::string& what, const Arena& arena, const void* data, const Shape& shape);

struct Bars {
  double out, lse, dq_dk, dv;
};
Bars bars_of(DType dtype);

struct GpuCase {
  std::string name;
  AttentionCase problem;
  bool dlse = true;
  bool external = false;    // out and lse of the backward are not those of the forward
  bool misaligned = false;  // see MirrorOptions
  Edge edge = Edge::kNone;
  Layout layout = Layout::kBhsd;
  // Rows of one or two keys have gradients that cancel to nothing, so errors are counted against a norm of at least
  // `floor`; a mask that is off by one key in a row shows in fp16 and fp32, not in bf16.
  double slack = 2.0, floor = 0.5;
};
// `name` and the dtype's; with `problem` in that dtype.
GpuCase make(std::string name, uint64_t seed, DType dtype, const AttentionProblem& problem);
AttentionProblem sizes(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_kv,
                       int64_t head_dim, int64_t head_dim_v);
AttentionOptions options_of(const AttentionCase& c, Backend backend, Layout layout);

// Forward and backward on every backend that takes the case, or on `only`, against the float64 reference.
void check_attention(const GpuCase& c, const CudaTarget* only = nullptr);
// All of them, in parallel.
void check_all(const std::vector<GpuCase>& cases, const CudaTarget* only = nullptr);

// Everything that forward and backward of a case write, on one backend.
std::vector<std::vector<double>> results_of(const GpuCase& c, const CudaTarget& target, cudaStream_t stream = nullptr);

}  // namespace plait::testing
