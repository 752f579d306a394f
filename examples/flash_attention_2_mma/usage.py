"""FlashAttention-2 as its users call it: half precision, [B, H, S, D], one function, a strategy if you like.

Called from the shell: python usage.py
"""

import torch
import torch.nn.functional as F
from plait import explain, flash_attention

torch.manual_seed(0)
B, H, S, D = 2, 8, 1024, 64
q, k, v = (torch.randn(B, H, S, D, dtype=torch.float16, requires_grad=True) for _ in range(3))

# Prefill and training: causal, differentiable.
out = flash_attention(q, k, v, causal=True, strategy="auto")
out.sum().backward()
expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
print(f"out {tuple(out.shape)} {out.dtype}, dq {tuple(q.grad.shape)}")
print(f"largest difference from torch's scaled_dot_product_attention in float32: {(out - expected).abs().max():.1e}")

# Decoding: one query row per head against many keys; auto now splits the keys.
row = torch.randn(B, H, 1, D, dtype=torch.float16)
with torch.no_grad():
    out = flash_attention(row, k, v, causal=True, strategy="auto")
print(f"out {tuple(out.shape)}")

# What auto chose, and what asking for the impossible says.
for name, query in (("prefill", q), ("decoding", row)):
    print(f"\n{name}: {explain(query, k, v, causal=True)}", end="")
try:
    flash_attention(q, k, v, causal=True, strategy="split_d")
except RuntimeError as refusal:
    print(f"\nrefused: {refusal}")
