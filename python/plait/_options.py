"""What every public function does with its arguments: names refused, options brought into op order, autocast.

Called by _attention.py, _iha.py and _kv_cache.py.
"""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor

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


def check_tensors(**tensors: object) -> None:
    """Raises ValueError for the first argument that is no tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")


def check_optional_tensors(**tensors: object) -> None:
    """Raises ValueError for the first argument that is neither None nor a tensor."""
    check_tensors(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


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
    left, right = _window(window)
    for name, text in (
        ("mode", mode),
        ("mask", mask),
        ("strategy", strategy),
        ("backend", backend),
        ("layout", layout),
    ):
        check_text(name, text)
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: got {flag!r}, expected True or False")
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


def _window(window: object) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: got {window!r}, expected None or (left, right), each a count >= 0, -1 or None")
    left, right = (-1 if side is None else _count("window", side) for side in window)
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
    return float(value)
