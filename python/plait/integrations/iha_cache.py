"""Key-value caches for converted models: IHA layers keep pseudo-heads (mixed) or source heads (raw), in place.

Called by users: `model.generate(ids, cache=IhaCache(model, max_cache_len=4096))`; the IHA layers find their part by
`iha_layer`. Needs the transformers package.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

import plait
from plait._options import autocast
from plait.integrations.iha_layers import IhaSelfAttention, decoder_layers
from plait.integrations.interval_mask import IntervalMask, refuse_mask

_KINDS = ("mixed", "raw")


class IhaCache(Cache):
    """A cache of `max_cache_len` tokens for a model that `convert_to_iha` changed.

    Joint IHA layers append through `plait.iha_attention_with_kvcache` and mix only the new tokens (kind "mixed", P
    times the memory) or all keys in each step (kind "raw"). Interleaved layers and layers that were not converted keep
    what transformers' dynamic cache keeps. Rows may be padded on the left; what is computed for padding is arbitrary.
    Beams, assisted decoding and continued chats work as with any cache; inference only.

    Args:
        model: the converted model, with or without its head. max_cache_len: tokens per row, prompt, padding and
            generated ones together. kind: "mixed" or "raw".
    """

    def __init__(self, model: nn.Module, max_cache_len: int, kind: str = "mixed"):
        if kind not in _KINDS:
            raise ValueError(f"kind: got {kind!r}, expected 'mixed' or 'raw'")
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1:
            raise ValueError(f"max_cache_len: got {max_cache_len!r}, expected a count of tokens of at least 1")
        layers = []
        for block in decoder_layers(model):
            attention = block.self_attn
            joint = isinstance(attention, IhaSelfAttention) and attention.mode == "joint"
            layers.append(IhaCacheLayer(max_cache_len, attention.P, kind) if joint else DynamicLayer())
        if not any(isinstance(layer, IhaCacheLayer) for layer in layers):
            raise ValueError("model: has no IHA layers in joint mode; use a DynamicCache, or convert_to_iha it first")
        super().__init__(layers=layers)

    def iha_layer(self, index: int) -> IhaCacheLayer | None:
        """The cache of an IHA layer, None for a layer whose keys and values go through `update`."""
        layer = self.layers[index]
        return layer if isinstance(layer, IhaCacheLayer) else None


class IhaCacheLayer(CacheLayerMixin):
    """The cache of one IHA layer: keys and values `[B, Hk, max_cache_len, P, D]` (mixed) or without P (raw).

    Each row starts with its first real token, wherever its padding ends.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, max_cache_len: int, P: int, kind: str):
        super().__init__()
        self.max_cache_len, self.P, self.kind = max_cache_len, P, kind
        self.cumulative_length = 0  # tokens seen, padding included

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        pseudo = (self.P,) if self.kind == "mixed" else ()
        self.keys, self.values = (
            x.new_zeros(*x.shape[:2], self.max_cache_len, *pseudo, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def attend(
        self,
        query: Tensor,  # [B, Hq, length, D], turned
        key: Tensor,  # [B, Hk, length, D], turned
        value: Tensor,  # [B, Hk, length, Dv]
        weights: tuple[Tensor, Tensor, Tensor],
        mask: IntervalMask,  # of `length` queries and all keys so far
        scale: float,
    ) -> Tensor:
        """Appends the new tokens and attends to all; returns `[B, length, Hq, Dv]`."""
        if not mask.causal:
            raise refuse_mask("it is not causal, which an IhaCache needs")
        length, seen = query.shape[2], self.cumulative_length
        if seen + length > self.max_cache_len:
            raise ValueError(
                f"max_cache_len: the cache holds {self.max_cache_len} tokens and would get {seen + length}; make a "
                "larger IhaCache"
            )
        query, key, value = autocast(query, key, value)
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        query, key, value = (x.to(self.keys.dtype) for x in (query, key, value))
        padding = _left_padding(mask, query.device)
        turn = mask.packed and length > 1
        if turn:  # bring the real tokens of each row to the front; padding lands behind them and is overwritten later
            shift = (padding - seen).clamp(0, length)
            query, key, value = (_turn(x, shift) for x in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):  # all in the dtype of the cache
            out = plait.iha_attention_with_kvcache(
                query,
                key,
                value,
                (self.keys, self.values),
                *weights,
                cache_kind=self.kind,
                cache_seqlens=(seen - padding).clamp(min=0).to(torch.int32),
                causal=True,
                window=mask.window,
                scale=scale,
            )
        self.cumulative_length += length
        return (_turn(out, -shift) if turn else out).transpose(1, 2)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise RuntimeError("cache: an IhaCache was made for another model; make it from the model that uses it")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cumulative_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name in earlier releases of transformers

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, given as a negative count; later ones overwrite them."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected the negative of a count")
        self.cumulative_length = max(self.cumulative_length + tokens_to_remove, 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (x.repeat_interleave(repeats, 0) for x in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = self.keys[indices], self.values[indices]


def _turn(x: Tensor, shift: Tensor) -> Tensor:
    """x `[B, H, length, D]` with the tokens of row b moved `shift[b]` to the front, those in front to the end."""
    index = (torch.arange(x.shape[2], device=x.device) + shift[:, None]) % x.shape[2]
    return x.gather(2, index[:, None, :, None].expand_as(x))


def _left_padding(mask: IntervalMask, device: torch.device) -> Tensor:
    """int64 `[batch]`: the tokens before each row's first real one. Reads the mask on the host once per layer."""
    row = torch.arange(mask.batch, device=device)
    if not mask.packed:
        return torch.zeros_like(row)
    # The sequence of a row's last query has to hold all keys from some point to the end; no other may have both.
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    last = torch.searchsorted(cu_q, (row + 1) * mask.q_length - 1, right=True) - 1
    begin, end = cu_k[last] - row * mask.kv_length, cu_k[last + 1] - row * mask.kv_length
    queries = cu_q[last + 1] - cu_q[last]
    only_padding = (begin == 0) & (end == 0) & (queries == mask.q_length)
    real = (begin >= 0) & (end == mask.kv_length) & (queries == (mask.kv_length - begin).clamp(max=mask.q_length))
    sequences = ((cu_q.diff() > 0) & (cu_k.diff() > 0)).sum()
    if not bool((real | only_padding).all() & (sequences == real.sum())):
        raise refuse_mask("a row is not one sequence up to its last token; an IhaCache takes left-padded rows only")
    return torch.where(only_padding, mask.kv_length, begin).long()
