// The kernels of this folder, one function each, dtype chosen at run time.
// Called by iha.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/iha/params.hpp"

namespace plait::cuda::iha {

void launch_expand(DType dtype, const Jobs<ExpandLayout>& jobs, int64_t blocks, cudaStream_t stream);
// T: __half or __nv_bfloat16; kColumns: jobs.layout.columns, 64 or 128.
template <class T, int kColumns>
void launch_contract(const Jobs<ContractLayout>& jobs, int64_t blocks, cudaStream_t stream);
void launch_reduce(DType dtype, const ReduceJobs& jobs, cudaStream_t stream);

// Collapse per head: weights(head, pseudo). Wide and narrow as in Job; backward writes partials [slices, wide, 1].
void launch_per_head_forward(DType dtype, const Job& job, cudaStream_t stream);
void launch_per_head_backward(DType dtype, const Job& job, int64_t slices, cudaStream_t stream);

}  // namespace plait::cuda::iha
