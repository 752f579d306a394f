"""Exact attention and Interleaved Head Attention (IHA) for PyTorch.

Called by users: `plait.flash_attention(q, k, v, causal=True)`, `plait.iha_attention(...)`, `plait.nn`. Importing it
loads the compiled ops (torch.ops.plait) and registers their fake kernels and gradients.
"""

from plait import _library

_library.load(__path__)

from plait import _autograd, _fake, functional, nn  # noqa: E402, F401
from plait.functional import (  # noqa: E402
    attention_backward,
    attention_with_kvcache,
    explain,
    flash_attention,
    flash_attention_varlen,
    flop_matched_window,
    fold_premix_into_projection,
    iha_attention,
    iha_attention_with_kvcache,
    merge_states,
    premix,
)

__version__ = "0.1.0"

__all__ = [
    "attention_backward",
    "attention_with_kvcache",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flop_matched_window",
    "fold_premix_into_projection",
    "functional",
    "iha_attention",
    "iha_attention_with_kvcache",
    "merge_states",
    "nn",
    "premix",
]
