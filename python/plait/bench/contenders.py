"""What runs in a comparison of attention or decode: plait on one or more backends, torch's kernels, a matrix product.

Called by bench.kernels through `contenders_of`; bench.iha_contenders does the same for IHA.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import plait
from plait.bench.cases import DTYPES, AttentionCase, DecodeCase
from plait.bench.protocol import Contender

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS = ("gemm", "copy", "einsum", "fa2_heads", "plait_causal", *SDPA, *(f"{name}_causal" for name in SDPA))
OURS = "ours:"  # begins the name of plait on a backend
_ROTATE_BYTES = 240e6  # memory-bound calls run over inputs of at least this size, several times the L2 of any GPU
_MOST_SETS = 64  # smaller inputs than that many sets fill are no memory-bound problem
_MATH_SCORES = 2**29  # of a larger score matrix `math` keeps many GiB and takes seconds
_GEMM_SIZE = {"cuda": 8192, "cpu": 512}

Call = Callable[[int], object]
Makers = dict[str, Callable[[], Contender]]


class Unsupported(RuntimeError):
    """A contender that has no kernel for a case; its message says why."""


def contenders_of(
    case: AttentionCase | DecodeCase, kind: str, device: torch.device, backends: list[str]
) -> tuple[Makers, dict[str, str]]:
    """Name -> maker of every contender, and backend -> reason of those of plait's that refuse the case.

    A maker raises RuntimeError or ValueError where its contender has no kernel.
    """
    if isinstance(case, DecodeCase):
        return _decode_makers(case, device, backends)
    q, k, v, dout = _inputs(case, device, kind == "bwd")
    flops = case.flops(kind == "bwd")
    served, refused = resolve(
        backends, lambda b: plait.explain(q, k, v, backward=kind == "bwd", **_options(case, device, b))
    )
    makers: Makers = {
        OURS + name: lambda asked=asked: Contender(_ours(case, kind, asked, q, k, v, dout), flops)
        for name, asked in served.items()
    }
    makers["gemm"] = lambda: gemm(device)
    for name in SDPA:
        makers[name] = lambda name=name: Contender(
            _peer(name, case, kind, q, k, v, dout), flops, sustained=name in ("cudnn", "fa2")
        )
    return makers, refused


def resolve(backends: list[str], explain: Callable[[str], str]) -> tuple[dict[str, str], dict[str, str]]:
    """Backend that a plan names -> what was asked for it, each once; and the reasons of those that have no plan."""
    served: dict[str, str] = {}
    refused = {}
    for asked in backends:
        try:
            name = re.search(r"^  backend +(\S+)$", explain(asked), re.MULTILINE).group(1)
        except (RuntimeError, ValueError) as error:
            refused[asked] = reason(error)
            continue
        served.setdefault(name, asked)
    return served, refused


def reason(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 200 else lines[0][:197] + "..."


def gemm(device: torch.device) -> Contender:
    """The bf16 matrix product through which results of different runs are compared."""
    size = _GEMM_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(1)
    a, b = (torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Contender(lambda i: a @ b, 2.0 * size**3)


def gradients_of(out: Tensor, inputs: tuple[Tensor, ...], dout: Tensor) -> Call:
    """A call of the backward alone."""
    return lambda i: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def ring_of(set_bytes: float) -> int:
    """How many input sets of a memory-bound call rotate, so that none of them stays in a cache. A set larger than a
    cache pushes itself out."""
    return min(math.ceil(_ROTATE_BYTES / set_bytes), _MOST_SETS)


def _inputs(case: AttentionCase, device: torch.device, gradients: bool) -> tuple[Tensor | None, ...]:
    """q, k, v, dout as projections leave them, `[B, S, H, D]` (packed `[B S, H, D]`), N(0, 1)."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, DTYPES[case.dtype])

    def draw(positions: int, heads: int, dim: int) -> Tensor:
        shape = (positions, heads, dim) if case.varlen else (case.batch, positions // case.batch, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    total_q, total_k = (sum(lengths) for lengths in zip(*case.lengths, strict=True))
    q = draw(total_q, case.heads_q, case.head_dim)
    k = draw(total_k, case.heads_kv, case.head_dim)
    v = draw(total_k, case.heads_kv, case.head_dim_v)
    return q, k, v, draw(total_q, case.heads_q, case.head_dim_v) if gradients else None


def _cu_seqlens(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of queries and keys."""
    return tuple(
        torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=torch.int32)
        for lengths in zip(*case.lengths, strict=True)
    )


def strategy_makers(case: AttentionCase, device: torch.device, strategies: tuple[str, ...]) -> Makers:
    """The forward of plait by each strategy, asked for by name."""
    q, k, v, _ = _inputs(case, device, False)
    return {
        name: lambda name=name: Contender(_ours(case, "fwd", "auto", q, k, v, None, name), case.flops(False))
        for name in strategies
    }


def _options(case: AttentionCase, device: torch.device, backend: str) -> dict:
    """plait's options for a case."""
    options = {"causal": case.causal, "window": (case.window, -1), "deterministic": case.deterministic}
    options |= {"backend": backend, "layout": "bshd"}
    if case.varlen:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = _cu_seqlens(case, device)
    return options


def _ours(
    case: AttentionCase,
    kind: str,
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    strategy: str = "auto",
) -> Call:
    options = _options(case, q.device, backend) | {"strategy": strategy}
    forward = plait.flash_attention_varlen if case.varlen else plait.flash_attention
    if kind == "fwd":
        return lambda i: forward(q, k, v, **options)
    out, lse = forward(q, k, v, return_lse=True, **options)
    return lambda i: plait.attention_backward(dout, q, k, v, out, lse, **options)


def _peer(name: str, case: AttentionCase, kind: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> Call:
    if name == "math" and case.scores > _MATH_SCORES:
        raise Unsupported(f"math: {case.scores / 2**29:.1f} x 2^29 scores are more than it gets here")
    if case.varlen or case.window >= 0:
        if name != "fa2":
            raise Unsupported(f"{name}: torch's SDPA has no {'packed sequences' if case.varlen else 'window'}")
        return flash_attention_2(case, kind, q, k, v, dout)
    return sdpa(name, kind, q, k, v, dout, case.causal)


def sdpa(name: str, kind: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, causal: bool) -> Call:
    """One backend of torch's SDPA on `[B, S, H, D]` tensors, seen as `[B, H, S, D]`."""
    if causal and q.shape[1] not in (1, k.shape[1]):
        raise Unsupported(f"{name}: torch's SDPA aligns the causal mask of different lengths to the first key")
    # The one row of a causal query sees every key.
    options = {"is_causal": causal and q.shape[1] > 1, "enable_gqa": q.shape[2] != k.shape[2]}
    q, k, v = (x.transpose(1, 2).detach().requires_grad_(kind == "bwd") for x in (q, k, v))

    def forward(i: int) -> Tensor:
        with sdpa_kernel(SDPA[name]):
            return scaled_dot_product_attention(q, k, v, **options)

    return forward if kind == "fwd" else gradients_of(forward(0), (q, k, v), dout.transpose(1, 2))


def flash_attention_2(case: AttentionCase, kind: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None) -> Call:
    """The kernel of SDPA's flash backend by its own op, which also takes windows and packed sequences."""
    if not q.is_cuda:
        raise Unsupported("fa2: torch has this op on CUDA only")
    cu_q, cu_k = _cu_seqlens(case, q.device) if case.varlen else (None, None)
    window = {} if case.window < 0 else {"window_size_left": case.window, "window_size_right": 0}
    q, k, v = (x.detach().requires_grad_(kind == "bwd") for x in (q, k, v))

    def forward(i: int) -> Tensor:
        sizes = (cu_q, cu_k, case.seqlen_q, case.seqlen_k)
        return torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, case.causal, False, **window)[0]

    return forward if kind == "fwd" else gradients_of(forward(0), (q, k, v), dout)


def _decode_makers(case: DecodeCase, device: torch.device, backends: list[str]) -> tuple[Makers, dict[str, str]]:
    """One query token over full caches; the caches rotate. The work is the bytes of K and V."""
    ring = ring_of(case.cache_bytes)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, DTYPES[case.dtype])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q = draw(case.batch, 1, case.heads_q, case.head_dim)
    caches = [tuple(draw(case.batch, case.seqlen_k, case.heads_kv, case.head_dim) for _ in "kv") for _ in range(ring)]
    options = {"layout": "bshd", "cache_seqlens": torch.full((case.batch,), case.seqlen_k, dtype=torch.int32)}
    options["cache_seqlens"] = options["cache_seqlens"].to(device)
    pools = caches
    if case.page:
        if case.seqlen_k % case.page:
            raise Unsupported(f"page {case.page} does not divide {case.seqlen_k} keys")
        pages = case.batch * case.seqlen_k // case.page
        order = torch.randperm(pages, generator=generator, device=device).int()
        options["block_table"] = order.reshape(case.batch, -1)
        pools = [tuple(x.reshape(pages, case.page, case.heads_kv, case.head_dim) for x in pair) for pair in caches]

    def ours(backend: str) -> Call:
        return lambda i: plait.attention_with_kvcache(q, *pools[i], backend=backend, **options)

    def peer(name: str) -> Call:
        calls = [sdpa(name, "fwd", q, k, v, None, False) for k, v in caches]
        return lambda i: calls[i](0)

    key, value = caches[0]
    served, refused = resolve(backends, lambda b: plait.explain(q, key, value, layout="bshd", backend=b))
    makers: Makers = {
        OURS + name: lambda asked=asked: Contender(ours(asked), case.cache_bytes, ring)
        for name, asked in served.items()
    }
    makers["copy"] = lambda: copy(device)
    for name in SDPA:
        makers[name] = lambda name=name: Contender(peer(name), case.cache_bytes, ring, name in ("cudnn", "fa2"))
    return makers, refused


def copy(device: torch.device) -> Contender:
    """A device-to-device copy, as the yardstick of memory-bound calls; counts bytes read and written."""
    size = 2**30 if device.type == "cuda" else 2**20
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Contender(lambda i: target.copy_(source), 2.0 * size)
