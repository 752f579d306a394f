// How a backend plugs in: a planning and a run function per op.
// Filled by api/registry.cpp from the backends of this build; read by plan() and by api/.
#pragma once

#include <span>

#include "core/problem.hpp"

namespace plait {

struct Implementation {
  Backend backend;
  // Planning; null where there is nothing to choose. See cpu/cpu.hpp for what they fill in.
  void (*plan_attention)(const AttentionProblem&, const DeviceInfo&, Plan&) = nullptr;
  void (*plan_premix)(const PremixProblem&, const DeviceInfo&, Plan&) = nullptr;
  // Whether the backend runs these premixes at once; then the plan gets their workspace. Null: one after the other.
  bool (*plan_premixes)(std::span<const PremixProblem>, const DeviceInfo&, Plan&) = nullptr;
  void (*plan_collapse)(const CollapseProblem&, const DeviceInfo&, Plan&) = nullptr;
  void (*plan_kvcache)(const KvCacheProblem&, const DeviceInfo&, Plan&) = nullptr;
  // Running, by problem.op.
  void (*run_attention)(const Plan&, const AttentionProblem&, const AttentionTensors&, void*,
                        const Executor&) = nullptr;
  void (*run_premix)(const Plan&, const PremixProblem&, const PremixTensors&, void*, const Executor&) = nullptr;
  void (*run_premixes)(const Plan&, std::span<const PremixProblem>, std::span<const PremixTensors>, void*,
                       const Executor&) = nullptr;
  void (*run_collapse)(const Plan&, const CollapseProblem&, const CollapseTensors&, void*, const Executor&) = nullptr;
  void (*run_kvcache)(const Plan&, const KvCacheProblem&, const KvCacheTensors&, void*, const Executor&) = nullptr;
};

using Registry = std::span<const Implementation>;

// Chooses a backend that serves the problem on the device and lets it plan. kAuto takes the first of the catalog that
// can (never the reference). Throws kUnsupported with required, supported and missing when none can.
Plan make_plan(const AttentionProblem& problem, const DeviceInfo& device, Registry registry);
Plan make_plan(const PremixProblem& problem, const DeviceInfo& device, Registry registry);
// Of several premixes: one backend for all, the last in the registry that one of them needs.
Plan make_plan(std::span<const PremixProblem> problems, const DeviceInfo& device, Registry registry);
Plan make_plan(const CollapseProblem& problem, const DeviceInfo& device, Registry registry);
Plan make_plan(const KvCacheProblem& problem, const DeviceInfo& device, Registry registry);

const Implementation& find_implementation(Registry registry, Backend backend);

}  // namespace plait
