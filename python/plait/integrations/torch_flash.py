"""plait in PyTorch's registry of flash implementations: scaled_dot_product_attention on plait's kernels.

Called by users: `plait.integrations.torch_flash.register()` once, then
`torch.nn.attention.activate_flash_attention_impl("plait")`. Nothing is registered or activated by importing this.

While plait is active, the flash kernels that torch has for CPU tensors are plait's: forward and backward, for every
call without a dense attn_mask in float16, bfloat16 or float32, except causal ones with more keys than queries (torch
aligns causal masks top-left). Other calls, CUDA tensors and `torch.nn.attention.varlen.varlen_attn` (CUDA only) stay
torch's own: call `plait.flash_attention` for them. `torch.nn.attention.restore_flash_attention_impl()` gives everything
back; torch 2.10 does not have it, and there plait stays active until the process ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library

import plait

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD_DIM = 1024


def register(name: str = "plait") -> None:
    """Offers plait under `name` to `torch.nn.attention.activate_flash_attention_impl`, and activates nothing.

    Calling it again is harmless. Raises RuntimeError where torch has no such registry.
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(
            f"torch {torch.__version__} has no registry of flash implementations; update it (2.13 has one), or call "
            "plait.flash_attention"
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_activate)


class _Handle:
    """Keeps the kernels registered until torch's registry removes them."""

    def __init__(self, library: Library):
        self.library: Library | None = library

    def remove(self) -> None:
        self.library = None  # the library takes its kernels back when nobody holds it


def _activate() -> _Handle:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # Replacing a kernel is the purpose here; torch warns of it.
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid", category=UserWarning)
        for name, kernel in ((_FORWARD, _forward), (_BACKWARD, _backward)):
            library.impl(name, kernel(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True)
    return _Handle(library)


def _serves(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, causal: bool, attn_mask: Tensor | None
) -> bool:
    return (
        attn_mask is None
        and dropout_p == 0
        and query.shape[-1] == value.shape[-1]
        and query.dtype in _DTYPES
        and max(query.shape[-1], value.shape[-1]) <= _LARGEST_HEAD_DIM
        and not (causal and query.shape[2] < key.shape[2])
    )


def _window(query: Tensor, key: Tensor, causal: bool) -> tuple[int, int]:
    """torch's causal mask, `j <= i`, as plait counts: from the last query and key."""
    return (-1, query.shape[2] - key.shape[2]) if causal else (-1, -1)


def _forward(otherwise: Callable) -> Callable:
    def forward(keyset, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        if not _serves(query, key, value, dropout_p, is_causal, attn_mask):
            rest = {"attn_mask": attn_mask, "scale": scale}
            return otherwise.call_boxed(keyset, query, key, value, dropout_p, is_causal, **rest)
        out, lse = plait.flash_attention(
            query, key, value, window=_window(query, key, is_causal), scale=scale, return_lse=True
        )
        return _in_order(out, torch.empty_like(query, device="meta").stride()), _positions_first(lse)

    return forward


def _backward(otherwise: Callable) -> Callable:
    def backward(
        keyset, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
    ):
        if not _serves(query, key, value, dropout_p, is_causal, attn_mask):
            tensors, rest = (grad_out, query, key, value, out, logsumexp), {"attn_mask": attn_mask, "scale": scale}
            return otherwise.call_boxed(keyset, *tensors, dropout_p, is_causal, **rest)
        grads = plait.attention_backward(
            grad_out, query, key, value, out, logsumexp, window=_window(query, key, is_causal), scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return tuple(_positions_first(grad) for grad in grads)

    return backward


# torch.compile relies on the strides that torch's own kernels give their results.


def _in_order(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    if x.stride() == stride:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def _positions_first(x: Tensor) -> Tensor:
    """x `[B, H, S, ..]` laid out as `[B, S, H, ..]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
