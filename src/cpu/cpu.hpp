// The CPU backend: SIMD tiles with online softmax, memory linear in length.
// Called by api/ with a finished Plan; the plan_* functions are called by core/plan.cpp through the registry.
#pragma once

#include "core/problem.hpp"

namespace plait::cpu {

// Fill tile_m, tile_n, splits, split_size, workers, workspace_bytes and `reasons`; plan.strategy is kSplitQ or
// kSplitKv when the caller asked for it, kAuto when this function is to choose.
void plan_attention(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);
void plan_premix(const PremixProblem& problem, const DeviceInfo& device, Plan& plan);
void plan_collapse(const CollapseProblem& problem, const DeviceInfo& device, Plan& plan);
void plan_kvcache(const KvCacheProblem& problem, const DeviceInfo& device, Plan& plan);

void attention_forward(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors,
                       void* workspace, const Executor& executor);
void attention_backward(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors,
                        void* workspace, const Executor& executor);
void premix_forward(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                    const Executor& executor);
void premix_backward(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                     const Executor& executor);
void collapse_forward(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                      const Executor& executor);
void collapse_backward(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors,
                       void* workspace, const Executor& executor);

void attention_with_kvcache(const Plan& plan, const KvCacheProblem& problem, const KvCacheTensors& tensors,
                            void* workspace, const Executor& executor);

// merge_states of attention.hpp, and its gradients; float64 too.
void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers);
void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor, int32_t workers);

}  // namespace plait::cpu
