// The public functions over a key/value cache: validate, plan, run.
// Called by C++ users, the C API and the torch shim.
#include "plait/kv_cache.hpp"

#include "api/registry.hpp"
#include "core/validate.hpp"

namespace plait {
namespace {

void run(const ValidatedKvCache& call, const Plan& plan, void* workspace, const Executor& executor) {
  api::check_plan(plan, call.problem.fingerprint(), workspace, executor);
  find_implementation(api::registry(), plan.backend).run_kvcache(plan, call.problem, call.tensors, workspace, executor);
}

}  // namespace

Plan plan_attention_with_kvcache(const KvCacheArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

Plan plan_iha_attention_with_kvcache(const IhaKvCacheArgs& args, const DeviceInfo& device) {
  return make_plan(validate(args, nullptr).problem, device, api::registry());
}

void attention_with_kvcache(const KvCacheArgs& args, const AttentionOutputs& outputs, const Plan& plan, void* workspace,
                            const Executor& executor) {
  run(validate(args, &outputs), plan, workspace, executor);
}

void iha_attention_with_kvcache(const IhaKvCacheArgs& args, const AttentionOutputs& outputs, const Plan& plan,
                                void* workspace, const Executor& executor) {
  run(validate(args, &outputs), plan, workspace, executor);
}

}  // namespace plait
