"""Turns attention layers of LLaMA-family models into Interleaved Head Attention, keeping their projections.

Called by users through integrations.transformers.convert_to_iha, by bench.models and by integrations.iha_cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from numbers import Real

import torch
from torch import nn

import plait
from plait.integrations.interval_mask import IntervalMask
from plait.integrations.masked_call import attend, refuse_unsupported, resolve_mask

# Attention modules of transformers whose forward is: project, (norm,) rotate, cache, attend, project.
_SUPPORTED = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")


class IhaSelfAttention(nn.Module):
    """Drop-in self-attention of a LLaMA-family decoder layer that mixes P pseudo-heads per head.

    Reuses the q, k, v and o projections of `source` (and its q and k norms) and adds `w_q [Hq, P, Hq]`, `w_k` and
    `w_v [Hk, P, Hk]`, and in interleaved mode the collapse `r [Hq, P]`. `w_q = w_k = identity` and
    `w_v = identity + noise` whose P slices sum to zero, and r picks the last pseudo-head: joint mode, and interleaved
    mode with `rope_index="token"`, start at exactly the outputs of `source`, and the pseudo-heads are no clones.
    Weights are fp32 (or wider).

    joint: rotary positions as in `source`, turned before mixing (the same, as all heads of a position turn alike).
    interleaved: angles by index, `rope_index` "row" (n * P + p) or "token" (n), restarting in padded and packed rows;
    `position_ids` are not read. With a key-value cache the cached keys are raw: joint keeps them rotated, interleaved
    not; the whole cache is mixed again in every step. An `IhaCache` spares joint layers that.
    """

    def __init__(
        self,
        source: nn.Module,
        P: int,
        *,
        mode: str = "joint",
        window: int | None = None,
        rope_index: str = "row",
        rotary_embedding: nn.Module | None = None,
        noise: float = 0.02,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = source.config, source.layer_idx, source.head_dim
        self.scaling, self.is_causal = source.scaling, source.is_causal
        self.attention_dropout = source.attention_dropout
        self.sliding_window = _sliding_window(source)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = source.q_proj, source.k_proj, source.v_proj, source.o_proj
        self.q_norm, self.k_norm = getattr(source, "q_norm", None), getattr(source, "k_norm", None)
        self.P, self.mode, self.window, self.rope_index = P, mode, window, rope_index
        heads_q = self.q_proj.out_features // self.head_dim
        heads_kv = self.k_proj.out_features // self.head_dim
        weight = self.q_proj.weight
        kind = {"dtype": torch.promote_types(weight.dtype, torch.float32), "device": weight.device}
        self.w_q = nn.Parameter(_identity(heads_q, P, **kind))
        self.w_k = nn.Parameter(_identity(heads_kv, P, **kind))
        self.w_v = nn.Parameter(_identity(heads_kv, P, **kind) + _zero_sum_noise(heads_kv, P, noise, generator, **kind))
        last = torch.zeros(heads_q, P, **kind)
        last[:, -1] = 1
        self.r = nn.Parameter(last) if mode == "interleaved" else None
        # A plain reference: the model owns its rotary embedding, this layer's state does not repeat it.
        object.__setattr__(self, "_rotary_embedding", rotary_embedding)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [batch, length, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,  # cos, sin [batch or 1, length, D_rot]
        attention_mask: IntervalMask | torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        refuse_unsupported(self.attention_dropout if self.training else 0.0, kwargs)
        cache = past_key_values if cache is None else cache
        query, key, value = self._project(hidden_states)
        cos, sin = position_embeddings
        joint = self.mode == "joint"
        fuse_rope = joint and cache is None and cos.shape[0] == 1 and not _packs(attention_mask, kwargs)
        if joint and not fuse_rope:
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        own = cache.iha_layer(self.layer_idx) if hasattr(cache, "iha_layer") else None
        if own is not None:
            all_keys = key[:, :, :1].expand(-1, -1, own.get_seq_length() + key.shape[2], -1)  # the shape is enough
        else:
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx)
            all_keys = key
        mask = resolve_mask(attention_mask, query, all_keys, self.is_causal, self.sliding_window, kwargs)
        mask = replace(mask, window=_tighter(mask.window, self.window, mask.causal))
        if own is not None:
            out = own.attend(query, key, value, (self.w_q, self.w_k, self.w_v), mask, self.scaling)
            return self.o_proj(out.flatten(-2)), None
        rope = None
        if fuse_rope:
            rope = _half_tables(cos, sin, query.dtype)
        elif not joint:
            mask = mask.with_positions()
            rope = self._index_rope(value, key.shape[2])
        run = partial(self._mix_and_attend, rope=rope)
        out = attend(run, run, query, key, value, mask, scale=self.scaling)
        return self.o_proj(out.flatten(-2)), None

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """query, key, value `[batch, heads, length, head_dim]`, before rotation."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (p(hidden_states).view(shape) for p in (self.q_proj, self.k_proj, self.v_proj))
        query = query if self.q_norm is None else self.q_norm(query)
        key = key if self.k_norm is None else self.k_norm(key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _mix_and_attend(self, query, key, value, *, rope, **options) -> torch.Tensor:
        if self.mode == "interleaved":
            options |= {"collapse": self.r, "rope_index": self.rope_index}
        return plait.iha_attention(
            query, key, value, self.w_q, self.w_k, self.w_v, mode=self.mode, rope=rope, **options
        )

    def _index_rope(self, like: torch.Tensor, kv_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin fp32 `[rows, D_rot / 2]` by virtual row or token, from the model's rotary embedding."""
        rows = kv_length * (self.P if self.rope_index == "row" else 1)
        positions = torch.arange(rows, device=like.device)[None]
        wide = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        return _half_tables(*self._rotary_embedding(wide, positions), wide.dtype)

    def extra_repr(self) -> str:
        return f"P={self.P}, mode={self.mode}, window={self.window}"


def convert_to_iha(
    model: nn.Module,
    layers: Iterable[int] | str,
    P: int,
    mode: str = "joint",
    window: int | None = None,
    *,
    rope_index: str = "row",
    noise: float = 0.02,
    seed: int = 0,
) -> nn.Module:
    """Replaces the attention of `layers` by IHA with `P` pseudo-heads, in place, and returns `model`.

    model: a LLaMA-, Mistral-, Qwen2- or Qwen3-style transformers model, with or without its head.
    layers: indices of decoder layers, or "all". window: keys to the left that a query sees, besides its own (as
    `plait.flop_matched_window` returns it; in interleaved mode in virtual rows); None or -1 = no window.
    rope_index: interleaved only, "row" (the paper) or "token". noise: standard deviation of what tells the
    pseudo-heads apart at the start.

    The model is switched to `attn_implementation="plait"`. Without a window, in joint mode or with
    `rope_index="token"`, its logits stay what they were. To load saved weights, build the model, convert it alike,
    then load its state dict.
    """
    from plait.integrations.transformers import register

    decoder = _decoder(model)
    blocks = decoder_layers(model)
    chosen = list(range(len(blocks))) if layers == "all" else _checked_layers(layers, len(blocks))
    if isinstance(P, bool) or not isinstance(P, int) or P < 1:
        raise ValueError(f"P: got {P!r}, expected a whole number of at least 1")
    if mode not in ("joint", "interleaved"):
        raise ValueError(f"mode: got {mode!r}, expected 'joint' or 'interleaved'")
    if rope_index not in ("row", "token"):
        raise ValueError(f"rope_index: got {rope_index!r}, expected 'row' or 'token'")
    if isinstance(noise, bool) or not isinstance(noise, Real) or not 0 <= noise < math.inf:
        raise ValueError(f"noise: got {noise!r}, expected a finite standard deviation of at least 0")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: got {seed!r}, expected a whole number that torch.Generator takes")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < -1):
        raise ValueError(f"window: got {window!r}, expected None, -1 (no window) or the number of keys to the left")
    for index in chosen:
        _check_attention(blocks[index].self_attn, index, mode)
    register()
    model.set_attn_implementation("plait")
    device = blocks[0].self_attn.q_proj.weight.device
    generator = torch.Generator(device).manual_seed(seed) if device.type != "meta" else None
    for index in chosen:
        blocks[index].self_attn = IhaSelfAttention(
            blocks[index].self_attn,
            P,
            mode=mode,
            window=window,
            rope_index=rope_index,
            rotary_embedding=decoder.rotary_emb,
            noise=noise,
            generator=generator,
        )
    return model


def _decoder(model: nn.Module) -> nn.Module:
    return getattr(model, getattr(model, "base_model_prefix", ""), model)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model, with or without its head."""
    decoder = _decoder(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(hasattr(layer, "self_attn") for layer in layers):
        raise ValueError(
            f"model: {type(decoder).__name__} has no decoder layers with self_attn; expected a LLaMA-family model"
        )
    return layers


def _checked_layers(layers: Iterable[int], count: int) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise ValueError(f"layers: got {layers!r}, expected 'all' or layer indices, such as [0, 2]")
    chosen = list(layers)
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ValueError(f"layers: got {index!r}, the model has layers 0 to {count - 1}")
    return sorted(set(chosen))


def _check_attention(attention: nn.Module, index: int, mode: str) -> None:
    if isinstance(attention, IhaSelfAttention):
        raise ValueError(f"layers: layer {index} is converted already")
    if type(attention).__name__ not in _SUPPORTED:
        raise ValueError(
            f"model: layer {index} has {type(attention).__name__}; convert_to_iha knows {', '.join(_SUPPORTED)}. "
            "Build other models with plait.nn.InterleavedHeadAttention"
        )
    if mode == "interleaved" and _sliding_window(attention) is not None:
        raise ValueError(
            f"mode: layer {index} has a sliding window of {_sliding_window(attention)} tokens, which interleaved mode "
            "cannot keep; use mode='joint' or a config without sliding_window"
        )


def _sliding_window(attention: nn.Module) -> int | None:
    """The window of a layer in keys including its own: Qwen sets it per layer, Mistral for the whole model."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    if type(attention).__name__ == "MistralAttention":
        return getattr(attention.config, "sliding_window", None)
    return None


def _identity(heads: int, P: int, **kind) -> torch.Tensor:
    """`[heads, P, heads]` with W[h, p, s] = 1 where h = s."""
    return torch.eye(heads, **kind)[:, None].repeat(1, P, 1)


def _zero_sum_noise(heads: int, P: int, scale: float, generator, **kind) -> torch.Tensor:
    """`[heads, P, heads]`, random, its P slices summing to zero; zero for P = 1."""
    noise = torch.randn(heads, P, heads, generator=generator, **kind) * scale
    return noise - noise.mean(1, keepdim=True)


def _packs(attention_mask, kwargs: dict) -> bool:
    """Whether tokens of one row may not stand at their index, so that rotary tables by index do not fit."""
    if isinstance(attention_mask, IntervalMask):
        return attention_mask.packed
    return attention_mask is not None or kwargs.get("cu_seq_lens_q") is not None


def _tighter(window: tuple[int, int], left: int | None, causal: bool) -> tuple[int, int]:
    if left is None or left < 0:
        return window
    left = left if window[0] < 0 else min(left, window[0])
    return (left, 0 if causal else window[1])


def _half_tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' tables `[1, rows, D_rot]`, two equal halves, as plait's `[rows, D_rot / 2]`, fp32 or wider."""
    half, wide = cos.shape[-1] // 2, torch.promote_types(dtype, torch.float32)
    return cos[0, :, :half].to(wide).contiguous(), sin[0, :, :half].to(wide).contiguous()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, style half: x `[batch, heads, length, head_dim]`, cos and sin `[batch or 1, length, D_rot]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)
