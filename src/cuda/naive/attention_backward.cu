// The backward call: delta, dq, dk and dv, dsinks.
// Called through naive.hpp.
#include "cuda/aux/aux.hpp"
#include "cuda/naive/backward.hpp"
#include "cuda/naive/naive.hpp"

namespace plait::cuda::naive {

void attention_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                        cudaStream_t stream) {
  auto* delta = static_cast<float*>(workspace);
  aux::launch_delta(problem, tensors, delta, stream);
  launch_dq(problem, tensors, delta, stream);
  launch_dkdv(problem, tensors, delta, stream);
  if (problem.has_sinks) aux::launch_dsinks(problem, tensors, delta, stream);
}

}  // namespace plait::cuda::naive
