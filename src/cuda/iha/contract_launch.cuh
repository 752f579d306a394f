// Chooses the instance of the contract kernel for an element type and a stage's columns by the n8 tiles of narrow
// heads. Called by variant.cu.in's translation units.
#pragma once

#include "cuda/iha/contract.cuh"
#include "cuda/iha/kernels.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::iha {

template <class T, int kColumns>
void launch_contract(const Jobs<ContractLayout>& jobs, int64_t blocks, cudaStream_t stream) {
  const int tiles = jobs.layout.narrow_tiles;
  const auto kernel = tiles == 1   ? contract_kernel<T, 1, kColumns>
                      : tiles == 2 ? contract_kernel<T, 2, kColumns>
                      : tiles == 3 ? contract_kernel<T, 3, kColumns>
                      : tiles == 4 ? contract_kernel<T, 4, kColumns>
                                   : contract_kernel<T, 8, kColumns>;
  launch(kernel, blocks, ContractLayout::kThreads, jobs.layout.shared_bytes, stream, jobs);
}

}  // namespace plait::cuda::iha
