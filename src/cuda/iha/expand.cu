// Instances of the expand kernel: dtype, and k16 steps over the narrow heads.
// Called by iha.cu.
#include "cuda/iha/expand.cuh"
#include "cuda/iha/kernels.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::iha {
namespace {

template <class T>
void launch_steps(const Jobs<ExpandLayout>& jobs, int64_t blocks, cudaStream_t stream) {
  const auto kernel = jobs.layout.steps == 1   ? expand_kernel<T, 1>
                      : jobs.layout.steps == 2 ? expand_kernel<T, 2>
                      : jobs.layout.steps == 3 ? expand_kernel<T, 3>
                                               : expand_kernel<T, 4>;
  launch(kernel, blocks, jobs.layout.warps * 32, jobs.layout.shared_bytes, stream, jobs);
}

}  // namespace

void launch_expand(DType dtype, const Jobs<ExpandLayout>& jobs, int64_t blocks, cudaStream_t stream) {
  if (dtype == DType::kFloat16) return launch_steps<__half>(jobs, blocks, stream);
  launch_steps<__nv_bfloat16>(jobs, blocks, stream);
}

}  // namespace plait::cuda::iha
