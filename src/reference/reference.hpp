// Textbook float64 attention and IHA with their gradients: the oracle of every other backend.
// Called by api/ for backend "reference" and by the tests. Never includes core/mask.hpp; single-threaded, no tiles.
#pragma once

#include "core/problem.hpp"

namespace plait::reference {

void attention_forward(const AttentionProblem& problem, const AttentionTensors& tensors);
void attention_backward(const AttentionProblem& problem, const AttentionTensors& tensors);
void premix_forward(const PremixProblem& problem, const PremixTensors& tensors);
void premix_backward(const PremixProblem& problem, const PremixTensors& tensors);
void collapse_forward(const CollapseProblem& problem, const CollapseTensors& tensors);
void collapse_backward(const CollapseProblem& problem, const CollapseTensors& tensors);

void attention_with_kvcache(const KvCacheProblem& problem, const KvCacheTensors& tensors);

}  // namespace plait::reference
