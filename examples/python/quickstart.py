"""Attention and Interleaved Head Attention with plait, in one minute on any CPU. Run: python quickstart.py"""

import plait
import torch

torch.manual_seed(0)
batch, heads, kv_heads, length, head_dim = 2, 8, 2, 256, 64

# Exact attention: grouped heads, causal, the last 64 positions, gradients through out and lse.
q = torch.randn(batch, heads, length, head_dim, requires_grad=True)
k = torch.randn(batch, kv_heads, length, head_dim, requires_grad=True)
v = torch.randn(batch, kv_heads, length, head_dim, requires_grad=True)
out, lse = plait.flash_attention(q, k, v, causal=True, window=(63, 0), return_lse=True)
(out.square().mean() + lse.mean()).backward()
print("attention", tuple(out.shape), "gradient of q", tuple(q.grad.shape))
print(plait.explain(q, k, v, causal=True, window=(63, 0)))

# Interleaved Head Attention: every head becomes P pseudo-heads, each a learned mixture of all heads. Identity weights
# make it plain attention; in long sequences a window keeps its cost near that of plain causal attention.
P = 2
w_q = torch.eye(heads)[:, None].repeat(1, P, 1)
w_kv = torch.eye(kv_heads)[:, None].repeat(1, P, 1)
mixed = plait.iha_attention(q, k, v, w_q, w_kv, w_kv, causal=True)
plain = plait.flash_attention(q, k, v, causal=True)
print("joint IHA with identity weights differs from attention by", (mixed - plain).abs().max().item())
left, ratio = plait.flop_matched_window(8192, P)
print(f"window for 8192 positions near the cost of causal attention: left = {left}, {ratio:.2f} times its key tiles")

# The same as a module, learning the running mean of what it has seen.
model = plait.nn.InterleavedHeadAttention(32, heads=4, kv_heads=2, head_dim=16, P=P)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(16, 24, 32)
target = x.cumsum(1) / torch.arange(1, 25)[:, None]
for step in range(61):
    loss = (model(x, causal=True) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}")
