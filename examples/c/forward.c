/* Causal attention from C: plan, allocate the workspace, run, and what an error looks like.
 * Called from the shell after building examples/c. */
#include <stdio.h>
#include <stdlib.h>

#include "plait/plait.h"

enum { kBatch = 1, kHeads = 4, kLength = 256, kDim = 64 };

/* Prints an error and returns 1, so that main can return it. */
static int failed(const plait_error* error) {
  fprintf(stderr, "plait: %s\n", error->message);
  return 1;
}

int main(void) {
  const int64_t shape[] = {kBatch, kHeads, kLength, kDim};
  const size_t count = (size_t)kBatch * kHeads * kLength * kDim;
  float* memory = malloc(4 * count * sizeof(float)); /* q, k, v, out */
  float* lse_memory = malloc(count / kDim * sizeof(float));
  if (memory == NULL || lse_memory == NULL) return 1;
  for (size_t i = 0; i < 3 * count; ++i) memory[i] = (float)(i % 31) / 31.0f - 0.5f;

  plait_error error;
  plait_tensor views[4], lse;
  for (int i = 0; i < 4; ++i) {
    if (plait_tensor_contiguous(&views[i], memory + (size_t)i * count, PLAIT_FLOAT32, 4, shape, &error))
      return failed(&error);
  }
  if (plait_tensor_contiguous(&lse, lse_memory, PLAIT_FLOAT32, 3, shape, &error)) return failed(&error);

  plait_attention params = PLAIT_ATTENTION_INIT;
  params.q = &views[0];
  params.k = &views[1];
  params.v = &views[2];
  params.out = &views[3];
  params.lse = &lse;
  params.options.causal = 1;

  const plait_device device = {"cpu", 0};
  plait_plan* plan = NULL;
  if (plait_plan_create(&plan, PLAIT_ATTENTION_FORWARD, &params, &device, &error)) return failed(&error);
  char text[2048];
  plait_plan_explain(plan, text, sizeof(text));
  printf("%s", text);

  void* workspace = aligned_alloc(64, ((size_t)plait_plan_workspace_bytes(plan) / 64 + 1) * 64);
  if (plait_run(plan, &params, workspace, NULL, &error)) return failed(&error);
  printf("out[0] = %.4f, lse[0] = %.4f\n", memory[3 * count], lse_memory[0]);

  /* A refusal names the argument, and nothing is written. */
  params.options.window_left = -5;
  plait_plan* refused = NULL;
  if (plait_plan_create(&refused, PLAIT_ATTENTION_FORWARD, &params, &device, &error) == PLAIT_INVALID_ARGUMENT) {
    printf("refused as it should be: %s\n", error.message);
  }
  plait_plan_destroy(plan);
  free(workspace);
  free(lse_memory);
  free(memory);
  return 0;
}
