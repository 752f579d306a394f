"""What every public function does with its arguments: names refused, options brought into op order, autocast.

Called by _attention.py, _iha.py, _kv_cache.py and plait.compat.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_or_false

from plait._padding import warn_of_padding

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
# Names that torch's SDPA, flash-attn and others have for what plait has too.
_OTHER_NAMES = {
    "is_causal": "causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window",
    "softmax_cap": "softcap",
    "logits_soft_cap": "softcap",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "page_table": "block_table",
}
_NOT_NEEDED = {
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "sliding_window": "a sliding window of W keys is window=(W - 1, 0)",
    "num_splits": "leave it out, or give split_size= in keys",
}


def refuse_unknown(function: Callable, unknown: dict[str, object]) -> None:
    """Raises for keywords that `function` does not have: ValueError where plait leaves out what it names."""
    for name, value in unknown.items():
        if name in _NOT_OFFERED and (value is None or (isinstance(value, (int, float)) and value == 0)):
            raise ValueError(f"{name}: got {value!r}; leave it out, plait has no argument of that name")
        if name in _NOT_OFFERED:
            raise ValueError(f"{name}: plait does not offer {_NOT_OFFERED[name]}; {_ELSEWHERE}")
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'{_hint(function, name)}")


def _hint(function: Callable, name: str) -> str:
    own = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if _OTHER_NAMES.get(name) in own:
        return f"; plait calls it {_OTHER_NAMES[name]}="
    if name in _NOT_NEEDED:
        return f"; {_NOT_NEEDED[name]}"
    near = difflib.get_close_matches(name, own, n=1)
    return f"; did you mean {near[0]}=?" if near else f"; it has {', '.join(own)}"


def call_renamed(names: dict[str, str] | tuple[dict, ...], function: Callable, *tensors: object, **options: object):
    """Calls `function`; where it refuses an argument that the caller knows under another name, says that name.

    names: the caller's by the function's; a tuple of such where the function numbers its arguments ("w[1]"). While
    tracing, the refusal keeps the function's names.
    """
    if torch.compiler.is_compiling():
        return function(*tensors, **options)
    try:
        return function(*tensors, **options)
    except (ValueError, RuntimeError) as refusal:
        text = str(refusal)
        if isinstance(names, tuple):
            numbered = re.match(r"([\w ]+)\[(\d+)\]:", text)
            if numbered is None:
                raise
            text, names = numbered[1] + text[numbered.end() - 1 :], names[int(numbered[2])]
            if numbered[1] not in names:  # an option of all: it has no number
                raise type(refusal)(text) from None
        if text.partition(":")[0] not in names:
            raise
        words = "|".join(sorted(names, key=len, reverse=True))
        raise type(refusal)(re.sub(rf"\b({words})\b", lambda word: names[word[0]], text)) from None


def split_qkv(q, k, v, w_q, w_k, w_v, cos, sin, cu_seqlens_q, cu_seqlens_k, style, index, offset, layout, backend):
    """The arguments of premix_forward that those of premix_qkv_forward stand for, one tuple for each tensor."""
    q_turns = cu_seqlens_k is not None or not guard_or_false(k.shape[2 if layout == "bhsd" else 1] == 0)
    q_cos, q_sin = (cos, sin) if q_turns else (None, None)
    return (
        (q, w_q, q_cos, q_sin, cu_seqlens_q, cu_seqlens_k, style, index, offset if q_turns else 0, layout, backend),
        (k, w_k, cos, sin, cu_seqlens_k, None, style, index, 0, layout, backend),
        (v, w_v, None, None, cu_seqlens_k, None, style, index, 0, layout, backend),
    )


def attention_forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """The op of that name: rest is sinks, cu_seqlens_q, cu_seqlens_k and what attention_options() made."""
    out, lse = torch.ops.plait.attention_forward(q, k, v, *rest)
    if not torch.compiler.is_compiling():
        warn_of_padding(q, v, rest[-3], stacklevel=3)
    return out, lse


# Offsets, lengths and page numbers; every other tensor is floating.
_INT32 = (
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "cache_seqlens",
    "block_table",
    "cache_batch_idx",
)
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
        0 if split_size is None else whole_number("split_size", split_size),
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


def check_cast(cast: Tensor, given: Tensor, *, wide: bool = False, **tensors: Tensor) -> None:
    """Raises for a tensor that autocast leaves alone and that does not fit the dtype that it gave `cast`.

    wide: float32 will do as well.
    """
    if cast.dtype == given.dtype:
        return
    legal = (cast.dtype, torch.float32) if wide else (cast.dtype,)
    for name, tensor in tensors.items():
        if tensor.dtype not in legal:
            expected = " or ".join(str(dtype) for dtype in legal)
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected {expected}: autocast is on and casts inputs to {cast.dtype}, "
                f"but not {name}; convert it, or call under torch.autocast(device_type, enabled=False)"
            )


def rope_tables(rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin of a rope argument; tables that require gradients are refused."""
    if rope is None:
        return None, None
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise ValueError(f"rope: got {type(rope).__name__}, expected None or (cos, sin)")
    cos, sin = rope
    check_tensors(**{"rope cos": cos, "rope sin": sin})
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError("rope: the tables require gradients, which plait does not compute; detach them")
    return cos, sin


def backward_options(options: tuple) -> tuple:
    """The options of a gradient, from those of its forward: split_size and strategy are the forward's alone, the
    backward has no strategies to choose among and plans its own."""
    *head, _, _, backend, out_dtype, layout = options
    return (*head, 0, "auto", backend, out_dtype, layout)


def window_of(window: object) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: got {window!r}, expected None or (left, right), each a count >= 0, -1 or None")
    left, right = (-1 if side is None else whole_number("window", side) for side in window)
    if not isinstance(left, torch.SymInt) and not isinstance(right, torch.SymInt) and min(left, right) < -1:
        raise ValueError(f"window: got {window!r}, expected counts >= 0, or -1 or None for unbounded")
    return left, right


def whole_number(name: str, value: object) -> int:
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
