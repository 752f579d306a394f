// From problems and tensors to jobs of the premix and collapse kernels.
// Called through iha.hpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "catalog/catalog.hpp"
#include "cuda/iha/iha.hpp"
#include "cuda/iha/kernels.hpp"

namespace plait::cuda::iha {
namespace {

TokenRows token_rows(const CanonicalTensor& t, const ColumnMap& columns) {
  const int64_t steps = t.batch_stride | t.head_stride | t.seq_stride | t.pseudo_stride;
  const bool vector =
      columns.whole() && t.dim_stride == 1 && steps % kTileElems == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return {t.data, t.batch_stride, t.head_stride, t.seq_stride, t.pseudo_stride, t.dim_stride, vector};
}

WeightMatrix weight_matrix(const TensorView& w, int head_axis, int pseudo_axis, int narrow_axis) {
  const auto stride = [&](int axis) { return axis < 0 ? 0 : w.stride[static_cast<size_t>(axis)]; };
  return {w.data, stride(head_axis), stride(pseudo_axis), stride(narrow_axis), w.dtype == DType::kFloat32};
}

RotaryTables rotary_tables(const PremixProblem& p, const PremixTensors& t) {
  if (!p.has_rope) return {};
  const auto whole = [](const TensorView& table) {
    return table.stride[1] == 1 && table.stride[0] % 4 == 0 && reinterpret_cast<uintptr_t>(table.data) % 16 == 0;
  };
  return {static_cast<const float*>(t.cos.data),
          static_cast<const float*>(t.sin.data),
          t.cos.stride[0],
          t.cos.stride[1],
          t.sin.stride[0],
          t.sin.stride[1],
          p.rope_rows,
          p.rope_offset,
          t.cu_seqlens_other,
          static_cast<int>(p.rope_dim),
          p.rope_style == RopeStyle::kPairs,
          p.rope_index == RopeIndex::kRow && p.pseudo_heads > 1 && p.rope_dim > 0,
          whole(t.cos) && whole(t.sin) && p.rope_dim % 8 == 0};
}

// What every job takes from its shape.
Job job_of(const MixShape& shape, int64_t seqlen) {
  Job job{};
  job.columns = shape.columns;
  job.seqlen = seqlen;
  job.tokens = shape.tokens;
  job.heads = shape.heads;
  job.pseudo = shape.pseudo;
  job.wide_count = shape.wide;
  job.segments = 1;
  return job;
}

// What both directions of a premix share.
Job premix_job(const PremixProblem& p, const PremixTensors& t, const MixShape& shape) {
  Job job = job_of(shape, p.seqlen);
  job.weights = weight_matrix(t.w, 0, 1, 2);
  job.rotary = rotary_tables(p, t);
  job.cu_seqlens = p.packed ? t.cu_seqlens : nullptr;
  job.sequences = p.batch;
  return job;
}

Job collapse_job(const CollapseProblem& p, const CollapseTensors& t, const MixShape& shape) {
  Job job = job_of(shape, p.seqlen);
  job.weights = p.global ? weight_matrix(t.r, 1, 2, 0) : weight_matrix(t.r, 0, 1, -1);
  return job;
}

void run_expand(DType dtype, std::span<const MixShape> shapes, std::span<const Job> from, const Limits& limits,
                cudaStream_t stream) {
  MixShape widest;
  for (const MixShape& s : shapes) widest = MixShape::widest(widest, s);
  Jobs<ExpandLayout> jobs{};
  jobs.layout = *find_expand_layout(widest, limits.shared_bytes);
  std::vector<int64_t> items;
  std::vector<int64_t> least;  // a warp stays with one chunk of columns
  for (const MixShape& s : shapes) {
    const int64_t chunks = ceil_div(s.columns.tiles(), ExpandLayout::kTiles);
    items.push_back(ceil_div(s.tokens * chunks, jobs.layout.warps));
    least.push_back(ceil_div(chunks, jobs.layout.warps));
  }
  const int64_t capacity = int64_t{limits.multiprocessors} * jobs.layout.blocks_per_multiprocessor;
  jobs.in_turn = *std::min_element(items.begin(), items.end()) >= capacity &&
                 *std::max_element(least.begin(), least.end()) <= capacity;
  const auto shares = share_blocks(shapes, items, capacity);
  int64_t blocks = 0;
  for (const Job& job : from) {
    const size_t j = static_cast<size_t>(jobs.count);
    Job& to = jobs.job[jobs.count++] = job;
    to.segments = static_cast<int>(ceil_div(shapes[j].wide, jobs.layout.wide_step));
    to.first_block = jobs.in_turn ? 0 : blocks;
    to.blocks = jobs.in_turn ? capacity : items[j] == 0 ? 0 : std::max(least[j], shares[j] / to.segments);
    blocks = jobs.in_turn ? capacity : blocks + to.blocks * to.segments;
  }
  launch_expand(dtype, jobs, blocks, stream);
}

void* advance(void* data, int64_t elems, bool is_float) {
  return static_cast<char*>(data) + elems * dtype_bytes(is_float ? DType::kFloat32 : DType::kFloat16);
}

template <class T>
void launch_columns(const Jobs<ContractLayout>& jobs, int64_t blocks, cudaStream_t stream) {
  (jobs.layout.columns == 64 ? launch_contract<T, 64> : launch_contract<T, 128>)(jobs, blocks, stream);
}

decltype(&launch_columns<__half>) launch_contract_of(DType dtype) {
  if constexpr (catalog::kMmaFloat16) {
    if (dtype == DType::kFloat16) return launch_columns<__half>;
  }
  if constexpr (catalog::kMmaBFloat16) {
    if (dtype == DType::kBFloat16) return launch_columns<__nv_bfloat16>;
  }
  throw Error(ErrorCode::kInternal, "backend", "the plan takes a kernel that this build lacks for the dtype");
}

// `gradients`: where the weight gradients go, one per job, when the plan has any.
void run_contract(DType dtype, const ContractPlan& plan, std::span<const Job> from,
                  std::span<const WeightMatrix> gradients, void* workspace, cudaStream_t stream) {
  for (const ContractLaunch& launch : plan.launches) {
    Jobs<ContractLayout> jobs{};
    ReduceJobs reduce{};
    jobs.layout = launch.layout;
    int64_t blocks = 0;
    for (const ContractJob& part : launch.jobs) {
      Job& job = jobs.job[jobs.count++] = from[static_cast<size_t>(part.job)];
      job.wide_begin = part.wide_begin;
      job.wide_count = part.wide_count;
      job.heads = part.narrow_count;
      job.weights.data = advance(job.weights.data, part.narrow_begin * job.weights.narrow_stride, job.weights.is_float);
      job.first_block = blocks;
      job.blocks = part.blocks;
      job.narrow_out.data = launch.makes.rows
                                ? advance(job.narrow_out.data, part.narrow_begin * job.narrow_out.head_stride, false)
                                : nullptr;
      if (!launch.makes.gradient) {
        job.narrow_in.data = nullptr;
      } else {
        job.partials = static_cast<float*>(workspace) + part.partials_offset;
        reduce.job[reduce.count++] = {
            job.partials,  gradients[static_cast<size_t>(part.job)], job.blocks, job.pseudo, job.heads, job.wide_begin,
            job.wide_count};
      }
      blocks += part.blocks;
    }
    launch_contract_of(dtype)(jobs, blocks, stream);
    if (reduce.count > 0) launch_reduce(dtype, reduce, stream);
  }
}

}  // namespace

void launch_premix_forward(std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                           const Limits& limits, cudaStream_t stream) {
  std::vector<MixShape> shapes;
  std::vector<Job> jobs;
  for (size_t i = 0; i < problems.size(); ++i) {
    shapes.push_back(MixShape::of(problems[i]));
    jobs.push_back(premix_job(problems[i], tensors[i], shapes[i]));
    jobs[i].narrow_in = token_rows(tensors[i].x, shapes[i].columns);
    jobs[i].wide_out = token_rows(tensors[i].y, shapes[i].columns);
  }
  run_expand(problems[0].dtype, shapes, jobs, limits, stream);
}

void launch_premix_backward(std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                            void* workspace, const Limits& limits, cudaStream_t stream) {
  std::vector<MixShape> shapes;
  std::vector<Job> jobs;
  std::vector<WeightMatrix> gradients;
  for (size_t i = 0; i < problems.size(); ++i) {
    shapes.push_back(MixShape::of(problems[i]));
    jobs.push_back(premix_job(problems[i], tensors[i], shapes[i]));
    jobs[i].wide_in = token_rows(tensors[i].dy, shapes[i].columns);
    jobs[i].narrow_in = token_rows(tensors[i].x, shapes[i].columns);
    jobs[i].narrow_out = token_rows(tensors[i].dx, shapes[i].columns);
    gradients.push_back(weight_matrix(tensors[i].dw, 0, 1, 2));
  }
  run_contract(problems[0].dtype, *plan_contract(shapes, {true, true}, limits), jobs, gradients, workspace, stream);
}

void launch_collapse_forward(const CollapseProblem& problem, const CollapseTensors& tensors, const Limits& limits,
                             cudaStream_t stream) {
  const MixShape shape = MixShape::of(problem);
  Job job = collapse_job(problem, tensors, shape);
  job.wide_in = token_rows(tensors.x, shape.columns);
  job.narrow_out = token_rows(tensors.y, shape.columns);
  if (!problem.global) return launch_per_head_forward(problem.dtype, job, stream);
  run_contract(problem.dtype, *plan_contract({&shape, 1}, {true, false}, limits), {&job, 1}, {}, nullptr, stream);
}

void launch_collapse_backward(const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                              const Limits& limits, cudaStream_t stream) {
  const MixShape shape = MixShape::of(problem);
  Job job = collapse_job(problem, tensors, shape);
  job.wide_in = token_rows(tensors.x, shape.columns);
  job.narrow_in = token_rows(tensors.dy, shape.columns);
  job.wide_out = token_rows(tensors.dx, shape.columns);
  if (problem.global) {
    const WeightMatrix gradient = weight_matrix(tensors.dr, 1, 2, 0);
    run_expand(problem.dtype, {&shape, 1}, {&job, 1}, limits, stream);
    run_contract(problem.dtype, *plan_contract({&shape, 1}, {false, true}, limits), {&job, 1}, {&gradient, 1},
                 workspace, stream);
    return;
  }
  const int64_t slices = per_head_slices(shape, limits);
  job.partials = static_cast<float*>(workspace);
  launch_per_head_backward(problem.dtype, job, slices, stream);
  const ReduceJob reduce{job.partials, weight_matrix(tensors.dr, 0, 1, -1), slices, shape.pseudo, 1, 0, shape.wide};
  launch_reduce(problem.dtype, {{reduce}, 1}, stream);
}

}  // namespace plait::cuda::iha
