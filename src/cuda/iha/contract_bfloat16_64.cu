// The contract kernel for bfloat16, stages of 64 columns.
// Called by iha.cu.
#include "cuda/iha/contract_launch.cuh"

namespace plait::cuda::iha {

template void launch_contract<DType::kBFloat16, 64>(const Jobs<ContractLayout>&, int64_t, cudaStream_t);

}  // namespace plait::cuda::iha
