// Which instruction sets the CPU backend is compiled for; must come before any Highway header.
// Included first by every .cpp of this folder that uses Highway.
#pragma once

// Fixed-width targets only (vectors live in C arrays), the best of each generation; the rest cost build time and gain
// nothing for fp32 arithmetic. The bits without a name are SSE2 and NEON without AES, unknown to Highway 1.0.3.
#define HWY_DISABLED_TARGETS                                                                                      \
  (~(HWY_SCALAR | HWY_EMU128 | (1LL << 14) | HWY_SSE4 | HWY_AVX2 | HWY_AVX3 | HWY_NEON | (1LL << 29) | HWY_WASM | \
     HWY_PPC8))
