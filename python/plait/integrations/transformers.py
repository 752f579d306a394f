"""plait inside transformers: `attn_implementation="plait"` and IHA layers for LLaMA-family models.

Called by users: `plait.integrations.transformers.register()` once, then build or load models as usual.
Needs the transformers package (5.x); nothing is registered by importing this module.
"""

from __future__ import annotations

import inspect

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import plait
from plait.integrations.iha_cache import IhaCache
from plait.integrations.iha_layers import IhaSelfAttention, convert_to_iha
from plait.integrations.interval_mask import IntervalMask
from plait.integrations.mask_functions import plait_mask
from plait.integrations.masked_call import attend, attend_step, refuse_unsupported, resolve_mask

__all__ = [
    "IhaCache",
    "IhaSelfAttention",
    "IntervalMask",
    "convert_to_iha",
    "plait_attention",
    "plait_mask",
    "register",
]


def register(name: str = "plait") -> None:
    """Registers attention and mask functions: models then take `attn_implementation="plait"`.

    Calling it again is harmless. Raises RuntimeError when the installed transformers builds masks in another way.
    """
    wanted = {"q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"}
    missing = wanted - set(inspect.signature(masking_utils.sdpa_mask).parameters)
    if missing:
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__}: its mask interface lacks {', '.join(sorted(missing))}; "
            "plait works with 5.24. Update transformers"
        )
    AttentionInterface.register(name, plait_attention)
    AttentionMaskInterface.register(name, plait_mask)


def plait_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, heads_q, q_length, head_dim]
    key: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim]
    value: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim_v]
    attention_mask: IntervalMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,  # [heads_q]: sinks
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for one layer; returns `[batch, q_length, heads_q, head_dim_v]` and no attention weights.

    `attention_mask` comes from `plait_mask` (or is a 4-D mask of the user, checked once); it carries causality and
    window. Without one, `is_causal`, `module.is_causal` and `sliding_window` decide. Dropout, attention weights and
    position biases are refused with ValueError.
    """
    refuse_unsupported(dropout, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = resolve_mask(attention_mask, query, key, is_causal, sliding_window, kwargs)
    options = {"scale": scaling, "softcap": softcap, "sinks": None if s_aux is None else s_aux.float()}
    out = attend_step(query, key, value, mask, **options)
    if out is None:
        out = attend(plait.flash_attention, plait.flash_attention_varlen, query, key, value, mask, **options)
    return out, None
