"""The functional API under one name; `plait` itself has the same functions.

Called by users; the functions live in _attention.py, _iha.py and _kv_cache.py.
"""

from plait._attention import attention_backward, explain, flash_attention, flash_attention_varlen, merge_states
from plait._iha import flop_matched_window, fold_premix_into_projection, iha_attention, premix
from plait._kv_cache import attention_with_kvcache, iha_attention_with_kvcache

__all__ = [
    "attention_backward",
    "attention_with_kvcache",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flop_matched_window",
    "fold_premix_into_projection",
    "iha_attention",
    "iha_attention_with_kvcache",
    "merge_states",
    "premix",
]
