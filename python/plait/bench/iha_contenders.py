"""What runs in a comparison of IHA's parts: premix beside einsum, attention and the layer beside causal attention.

Called by bench.kernels through `contenders_of`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import plait
from plait._options import attention_options
from plait.bench.cases import DTYPES, AttentionCase, IhaCase
from plait.bench.contenders import (
    OURS,
    Call,
    Makers,
    copy,
    flash_attention_2,
    gemm,
    gradients_of,
    resolve,
    ring_of,
    sdpa,
)
from plait.bench.protocol import Contender


def contenders_of(case: IhaCase, kind: str, device: torch.device, backends: list[str]) -> tuple[Makers, dict[str, str]]:
    """As bench.contenders.contenders_of."""
    pseudo = torch.empty(
        (1, case.length, case.heads, case.pseudo, case.head_dim),
        dtype=getattr(torch, DTYPES[case.dtype]),
        device=device,
    )
    served, refused = resolve(backends, lambda b: plait.explain(
        pseudo, pseudo, pseudo, backward=kind == "bwd", mode=case.mode, causal=True, window=(case.window, -1),
        layout="bshd", backend=b,
    ))  # fmt: skip
    make = {"premix": _premix_makers, "attention": _attention_makers, "layer": _layer_makers}[case.part]
    return make(case, kind, device, served), refused


class _Draw:
    """Random tensors of a case, N(0, 1)."""

    def __init__(self, case: IhaCase, device: torch.device):
        self.case, self.device = case, device
        self.dtype = getattr(torch, DTYPES[case.dtype])
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype or self.dtype)

    def heads(self) -> Tensor:  # [1, N, H, D]
        return self.normal(1, self.case.length, self.case.heads, self.case.head_dim)

    def pseudo_heads(self) -> Tensor:  # [1, N, H, P, D]
        return self.normal(1, self.case.length, self.case.heads, self.case.pseudo, self.case.head_dim)

    def weights(self) -> Tensor:  # [H, P, H] fp32, keeps the scale of what it mixes
        heads = self.case.heads
        return self.normal(heads, self.case.pseudo, heads, dtype=torch.float32) / heads**0.5


def _premix_makers(case: IhaCase, kind: str, device: torch.device, backends: dict[str, str]) -> Makers:
    """Q, K and V, of which Q and K turn (RoPE). Inputs rotate. plait keeps the weights in fp32, einsum needs them in
    the dtype of the inputs."""
    draw = _Draw(case, device)
    backward = kind == "bwd"
    work = case.premix_bytes(backward)
    shrink = case.pseudo + 2 if backward else case.pseudo + 1
    ring = ring_of(work / shrink * (case.pseudo + 1 if backward else 1))
    xs = [[draw.heads() for _ in "qkv"] for _ in range(ring)]
    douts = [[draw.pseudo_heads() for _ in "qkv"] for _ in range(ring)] if backward else []
    ws = [draw.weights() for _ in "qkv"]

    def calls(mix, weights: list[Tensor]) -> Call:
        if not backward:
            return lambda i: mix(xs[i], weights)
        weights = [w.detach().requires_grad_() for w in weights]
        leaves = [[x.detach().requires_grad_() for x in group] for group in xs]
        outs = [mix(group, weights) for group in leaves]
        return lambda i: torch.autograd.grad(outs[i], [*leaves[i], *weights], douts[i], retain_graph=True)

    frequencies = 10000 ** -torch.linspace(0, 1, case.head_dim // 2, device=device)
    angles = torch.outer(torch.arange(case.length, device=device), frequencies)
    cos, sin = angles.cos(), angles.sin()

    def ours(backend: str) -> Call:
        options = (cos, sin, None, None, "half", "token", 0, "bshd", backend)
        return calls(lambda group, weights: torch.ops.plait.premix_qkv_forward(*group, *weights, *options), ws)

    def einsum() -> Call:
        c, s = (x.to(draw.dtype)[:, None, None] for x in (cos, sin))

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

        def mix(group: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
            q, k, v = (torch.einsum("hps,bnsd->bnhpd", w, x) for x, w in zip(group, weights, strict=True))
            return [turned(q), turned(k), v]

        return calls(mix, [w.to(draw.dtype) for w in ws])

    makers: Makers = {
        OURS + name: lambda asked=asked: Contender(ours(asked), work, ring) for name, asked in backends.items()
    }
    return makers | {"copy": lambda: copy(device), "einsum": lambda: Contender(einsum(), work, ring)}


def _attention_makers(case: IhaCase, kind: str, device: torch.device, backends: dict[str, str]) -> Makers:
    """Attention among given pseudo-heads. Peers: the same windows as H P independent heads (joint, so without the
    merge) or as one long sequence (interleaved), and causal attention on the same tokens."""
    draw = _Draw(case, device)
    flops = case.flops(kind == "bwd")
    q, k, v = (draw.pseudo_heads() for _ in "qkv")
    joint = case.mode == "joint"
    dout = None
    if kind == "bwd":
        dout = draw.heads() if joint else draw.pseudo_heads()

    def ours(backend: str) -> Call:
        options = attention_options(
            mode=case.mode, causal=True, window=(case.window, -1), scale=None, softcap=None, deterministic=False,
            split_size=None, strategy="auto", backend=backend, out_dtype=None, layout="bshd",
        )  # fmt: skip
        leaves = tuple(x.detach().requires_grad_(kind == "bwd") for x in (q, k, v))

        def forward(i: int) -> Tensor:
            return torch.ops.plait.attention_forward(*leaves, None, None, None, *options)[0]

        return forward if kind == "fwd" else gradients_of(forward(0), leaves, dout)

    def same_windows() -> Call:
        rows = case.length if joint else case.length * case.pseudo
        heads = case.heads * case.pseudo if joint else case.heads
        shape = (1, rows, heads, case.head_dim)
        tensors = [(x if joint else x.transpose(2, 3)).reshape(shape) for x in (q, k, v)]
        gradient = None if dout is None else draw.normal(*shape)
        sizes = (1, rows, rows, heads, heads, case.head_dim, case.head_dim)
        plain = AttentionCase(*sizes, causal=True, window=case.window)
        return flash_attention_2(plain, kind, *tensors, gradient)

    makers: Makers = {
        OURS + name: lambda asked=asked: Contender(ours(asked), flops) for name, asked in backends.items()
    }
    makers["gemm"] = lambda: gemm(device)
    makers["fa2_heads" if joint else "fa2"] = lambda: Contender(same_windows(), flops)
    return makers | _causal_makers(case, kind, draw, backends)


def _layer_makers(case: IhaCase, kind: str, device: torch.device, backends: dict[str, str]) -> Makers:
    """Premix with rotation, attention and, interleaved, the collapse, beside causal attention on the same tokens."""
    draw = _Draw(case, device)
    joint = case.mode == "joint"
    rows = case.length if joint else case.length * case.pseudo
    angles = torch.rand((rows, case.head_dim // 2), device=device) * 6.283
    rope = (angles.cos(), angles.sin())
    inputs = [*(draw.heads() for _ in "qkv"), *(draw.weights() for _ in "qkv")]
    if not joint:
        inputs.append(draw.normal(case.heads, case.pseudo, dtype=torch.float32))
    dout = draw.heads() if kind == "bwd" else None

    def ours(backend: str) -> Call:
        leaves = tuple(x.detach().requires_grad_(kind == "bwd") for x in inputs)

        def forward(i: int) -> Tensor:
            return plait.iha_attention(
                *leaves[:6], mode=case.mode, collapse=None if joint else leaves[6], rope=rope, causal=True,
                window=(case.window, -1), layout="bshd", backend=backend,
            )  # fmt: skip

        return forward if kind == "fwd" else gradients_of(forward(0), leaves, dout)

    makers: Makers = {OURS + name: lambda asked=asked: Contender(ours(asked), 1.0) for name, asked in backends.items()}
    makers["gemm"] = lambda: gemm(device)
    return makers | _causal_makers(case, kind, draw, backends)


def _causal_makers(case: IhaCase, kind: str, draw: _Draw, backends: dict[str, str]) -> Makers:
    """Causal attention on the same tokens: plait's on the first of the backends, cuDNN's and FlashAttention-2's."""
    flops = case.plain.flops(kind == "bwd")
    q, k, v = (draw.heads() for _ in "qkv")
    dout = draw.heads() if kind == "bwd" else None

    def ours() -> Call:
        leaves = tuple(x.detach().requires_grad_(kind == "bwd") for x in (q, k, v))

        def forward(i: int) -> Tensor:
            return plait.flash_attention(*leaves, causal=True, layout="bshd", backend=next(iter(backends.values())))

        return forward if kind == "fwd" else gradients_of(forward(0), leaves, dout)

    makers: Makers = {"plait_causal": lambda: Contender(ours(), flops)} if backends else {}
    for name in ("cudnn", "fa2"):
        makers[name + "_causal"] = lambda name=name: Contender(sdpa(name, kind, q, k, v, dout, True), flops)
    return makers
