"""What every public function does with its arguments: names refused, options brought into op order, autocast.

Called by _attention.py, _iha.py and _kv_cache.py.
"""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor
from torch.autograd import forward_ad

_MATH = "use torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH"
_ELSEWHERE = "use torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.flex_attention"
_NOT_OFFERED = {
    "dropout_p": "dropout",
    "dropout": "dropout",
    "attn_mask": "arbitrary masks; what plait has is causal=, window= and cu_seqlens",
    "attn_bias": "attention biases",
    "bias": "attention biases",
    "alibi_slopes": "ALiBi",
}


def refuse_unknown(function: str, unknown: dict[str, object]) -> None:
    """Raises for keywords that `function` does not have: ValueError where plait leaves out what it names."""
    for name in unknown:
        if name in _NOT_OFFERED:
            raise ValueError(f"{name}: plait does not offer {_NOT_OFFERED[name]}; {_ELSEWHERE}")
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")


# Offsets, lengths and page numbers; every other tensor is floating.
_INT32 = ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "block_table", "cache_batch_idx")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(like: Tensor | None = None, **tensors: object) -> None:
    """Raises ValueError for the first argument that is no tensor, is sparse or nested, or is of a foreign dtype.

    Also for a meta tensor among real ones (`like`, or the first), which torch would send to a kernel that computes
    nothing, and for a tangent of forward-mode differentiation, which the ops would drop.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise ValueError(f"{name}: got a nested or sparse tensor, expected a strided one; pack it with cu_seqlens")
        if name in _INT32 and tensor.dtype != torch.int32:
            raise ValueError(f"{name}: got {tensor.dtype}, expected torch.int32; call .to(torch.int32)")
        if name not in _INT32 and tensor.dtype not in _FLOATING:
            raise ValueError(f"{name}: got {tensor.dtype}, expected float16, bfloat16, float32 or float64")
        like = tensor if like is None else like
        if (tensor.device.type == "meta") != (like.device.type == "meta"):
            raise ValueError(f"{name}: got device {tensor.device}, expected that of the other tensors, {like.device}")
        if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(
                    f"{name}: got a forward-mode tangent, and plait has backward gradients only; {_MATH}"
                )


def check_optional_tensors(like: Tensor, **tensors: object) -> None:
    """As check_tensors for the arguments that are not None."""
    check_tensors(like, **{name: tensor for name, tensor in tensors.items() if tensor is not None})


def check_max_seqlen(**values: object) -> None:
    """A launch bound that never changes a result: any count, or a tensor with one element, which is never read."""
    for name, value in values.items():
        if value is None or (isinstance(value, Tensor) and value.dim() == 0):
            continue
        if isinstance(value, (Tensor, bool)) or not isinstance(value, (Integral, torch.SymInt)) or value < 0:
            got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name}: got {got}, expected None, a count >= 0 or a 0-dim tensor")


def attention_options(
    *,
    mode: str = "plain",
    mask: str = "flat",
    causal: bool,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    softcap: float | None,
    deterministic: bool,
    split_size: int | None,
    strategy: str,
    backend: str,
    out_dtype: torch.dtype | None,
    layout: str,
) -> tuple:
    """The options in the order of the ops' schema. Values are checked by the library, types here."""
    left, right = window_of(window)
    for name, text in (
        ("mode", mode),
        ("mask", mask),
        ("strategy", strategy),
        ("backend", backend),
        ("layout", layout),
    ):
        check_text(name, text)
    check_flags(causal=causal, deterministic=deterministic)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ValueError(f"out_dtype: got {out_dtype!r}, expected None or a torch.dtype")
    return (
        mode,
        mask,
        causal,
        left,
        right,
        None if scale is None else _number("scale", scale),
        0.0 if softcap is None else _number("softcap", softcap),
        deterministic,
        0 if split_size is None else _count("split_size", split_size),
        strategy,
        backend,
        out_dtype,
        layout,
    )


def check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: got {flag!r}, expected True or False")


def check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {text!r}, expected a string")


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the tensors in its dtype (float64 stays); otherwise as they are. As torch's SDPA does."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def window_of(window: object) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: got {window!r}, expected None or (left, right), each a count >= 0, -1 or None")
    left, right = (-1 if side is None else _count("window", side) for side in window)
    if not isinstance(left, torch.SymInt) and not isinstance(right, torch.SymInt) and min(left, right) < -1:
        raise ValueError(f"window: got {window!r}, expected counts >= 0, or -1 or None for unbounded")
    return left, right


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise ValueError(f"{name}: got {value!r}, expected a whole number")
    if not isinstance(value, torch.SymInt) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at most 63 bits")
    return value if isinstance(value, torch.SymInt) else int(value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise ValueError(f"{name}: got {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}: got a number beyond float64, expected a finite one") from error
