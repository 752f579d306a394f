// The contract kernel for float16, stages of 64 columns.
// Called by iha.cu.
#include "cuda/iha/contract_launch.cuh"

namespace plait::cuda::iha {

template void launch_contract<DType::kFloat16, 64>(const Jobs<ContractLayout>&, int64_t, cudaStream_t);

}  // namespace plait::cuda::iha
