"""Modules: self-attention with Interleaved Head Attention.

Called by users; plait.integrations converts existing models instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait._iha import iha_attention
from plait._options import check_optional_tensors, check_tensors, window_of

_LARGEST_HEAD_DIM = 1024
_NOISE = 0.02  # standard deviation of what tells the pseudo-heads apart at the start


class InterleavedHeadAttention(nn.Module):
    """Self-attention over P pseudo-heads per head, in place of multi-head or grouped-query attention.

    Projections without bias; `w_q [heads, P, heads]`, `w_k` and `w_v [kv_heads, P, kv_heads]` mix heads into
    pseudo-heads; interleaved mode has the collapse `r [heads, P]`. See `plait.iha_attention` for the formulas.

    Initialisation: w_q and w_k are the identity for every p, w_v the identity plus noise whose P slices sum to zero.
    The module then computes what attention with the same projections would (joint: always; interleaved: without a
    window and without rotation by row, r picks the last pseudo-head, whose row sees the whole token), while no
    pseudo-head is a clone of another.

    Args:
        hidden: width of the input and output. heads, kv_heads: `heads % kv_heads == 0`. head_dim: of q, k and v.
        P: pseudo-heads per head, at least 1. mode: "joint" or "interleaved".
        window: `(left, right)` in positions (joint) or rows (interleaved), None unbounded; see
            `plait.flop_matched_window`.
        dtype, device: of the projections; w_q, w_k, w_v and r are float32 for float16 and bfloat16, in which the noise
            would not sum to zero.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        P: int,
        mode: str = "joint",
        window: tuple[int | None, int | None] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "P": P}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
        if heads % kv_heads != 0:
            raise ValueError(f"kv_heads: got {kv_heads} for {heads} heads, expected a divisor of {heads}")
        if mode not in ("joint", "interleaved"):
            raise ValueError(f"mode: got {mode!r}, expected 'joint' or 'interleaved'")
        if head_dim > _LARGEST_HEAD_DIM:
            raise ValueError(f"head_dim: got {head_dim}, supported 1 to {_LARGEST_HEAD_DIM}")
        window_of(window)  # raises for what no call could use
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.P, self.mode, self.window = P, mode, window
        kind = {"dtype": dtype, "device": device}
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False, **kind)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False, **kind)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False, **kind)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False, **kind)
        mixing = kind | {"dtype": torch.promote_types(self.q_proj.weight.dtype, torch.float32)}
        self.w_q = nn.Parameter(torch.empty(heads, P, heads, **mixing))
        self.w_k = nn.Parameter(torch.empty(kv_heads, P, kv_heads, **mixing))
        self.w_v = nn.Parameter(torch.empty(kv_heads, P, kv_heads, **mixing))
        self.r = nn.Parameter(torch.empty(heads, P, **mixing)) if mode == "interleaved" else None
        self._reset_mixing()

    def reset_parameters(self) -> None:
        """Draws every parameter anew, the projections as torch.nn.Linear does."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            projection.reset_parameters()
        self._reset_mixing()

    @torch.no_grad()
    def _reset_mixing(self) -> None:
        for w in (self.w_q, self.w_k, self.w_v):
            w.copy_(torch.eye(w.shape[0], dtype=w.dtype, device=w.device)[:, None])
        noise = torch.empty_like(self.w_v).normal_(std=_NOISE)
        self.w_v.add_(noise - noise.mean(1, keepdim=True))
        if self.r is not None:
            self.r.zero_()
            self.r[:, -1] = 1

    def forward(
        self,
        x: Tensor,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        rope_style: str = "half",
        rope_index: str = "row",
        causal: bool = True,
        cu_seqlens: Tensor | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
    ) -> Tensor:
        """x `[B, N, hidden]`, or packed `[total, hidden]` with int32 cu_seqlens `[batch + 1]`; returns the same shape.

        rope: `(cos, sin)` `[positions, D_rot / 2]`; the other options as in `plait.iha_attention`.
        """
        check_tensors(x=x)
        check_optional_tensors(x, cu_seqlens=cu_seqlens)
        rank, shape = (3, "[B, N, hidden]") if cu_seqlens is None else (2, "[total, hidden]")
        if x.dim() != rank or x.shape[-1] != self.hidden:
            raise ValueError(f"x: got shape {list(x.shape)}, expected {shape} with hidden = {self.hidden}")
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        out = iha_attention(
            q,
            k,
            v,
            self.w_q,
            self.w_k,
            self.w_v,
            mode=self.mode,
            collapse=self.r,
            rope=rope,
            rope_style=rope_style,
            rope_index=rope_index,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            causal=causal,
            window=self.window,
            strategy=strategy,
            backend=backend,
            deterministic=deterministic,
            layout="bshd",
        )
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"P={self.P}, mode={self.mode}, window={self.window}"
        )
