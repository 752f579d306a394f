// From what the user gave to a proven problem; holds every user-facing message about arguments.
// Called by api/ before planning and again before running (with outputs); `outputs` null means planning only.
#pragma once

#include "core/problem.hpp"

namespace plait {

struct ValidatedAttention {
  AttentionProblem problem;
  AttentionTensors tensors;
};
struct ValidatedPremix {
  PremixProblem problem;
  PremixTensors tensors;
};
struct ValidatedCollapse {
  CollapseProblem problem;
  CollapseTensors tensors;
};

struct ValidatedKvCache {
  KvCacheProblem problem;
  KvCacheTensors tensors;
};

ValidatedAttention validate(const AttentionArgs& args, const AttentionOutputs* outputs);
ValidatedAttention validate(const AttentionBackwardArgs& args, const AttentionGrads* grads);
// Forward: `y`, or null when planning.
ValidatedPremix validate(const PremixArgs& args, const TensorView* y);
ValidatedCollapse validate(const CollapseArgs& args, const TensorView* y);
// Backward: all three, or all null when planning.
ValidatedPremix validate(const PremixArgs& args, const TensorView* dy, const TensorView* dx, const TensorView* dw);
ValidatedCollapse validate(const CollapseArgs& args, const TensorView* dy, const TensorView* dx, const TensorView* dr);
// merge_states: checks every part against the outputs; returns nothing, throws on the first fault.
void validate(const MergeArgs& args, const AttentionOutputs& outputs);
// merge_states_backward: `grads` are the outputs, one for each part of `args`; dout and dlse may be expanded.
void validate(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout, const TensorView* dlse,
              const MergeArgs& grads);

ValidatedKvCache validate(const KvCacheArgs& args, const AttentionOutputs* outputs);
ValidatedKvCache validate(const IhaKvCacheArgs& args, const AttentionOutputs* outputs);

// Parts that attention and cache calls share: the values of the options, and their place in the problem.
void validate_options(const AttentionOptions& options);
void set_options(const AttentionOptions& options, const TensorView& q, AttentionProblem& problem);
// Checks out and lse against the problem and sets them; `args` gives layout, mode and q.
void set_outputs(const AttentionArgs& args, const AttentionOutputs& outputs, const AttentionProblem& problem,
                 AttentionTensors& tensors);

// Shape of lse for a problem, as the public API sees it: [B, Hq, rows] or [Hq, total_rows].
TensorView lse_shape(const AttentionProblem& problem);

}  // namespace plait
