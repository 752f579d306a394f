"""The functional API under one name; `plait` itself has the same functions.

Called by users; the functions live in _attention.py and _iha.py.
"""

from plait._attention import attention_backward, explain, flash_attention, flash_attention_varlen, merge_states
from plait._iha import flop_matched_window, fold_premix_into_projection, iha_attention, premix

__all__ = [
    "attention_backward",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flop_matched_window",
    "fold_premix_into_projection",
    "iha_attention",
    "merge_states",
    "premix",
]
