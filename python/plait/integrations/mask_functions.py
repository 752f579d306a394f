"""transformers' mask interface for plait: mask functions and padding become row intervals, once per forward.

Called by transformers' masking code through integrations.transformers.register().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import masking_utils

from plait.integrations.interval_mask import IntervalMask, from_dense, from_padding, from_sequence_ids, refuse_mask


@dataclass(frozen=True)
class _Pattern:
    """What a mask function means: query i sees keys i - left .. i + right (-1: unbounded) of its own sequence."""

    causal: bool = False
    left: int = -1
    right: int = -1
    sequence_ids: torch.Tensor | None = None  # [batch, length]
    by_position: bool = False  # written over positions within a sequence, so sequence_ids have to come with it

    @property
    def window(self) -> tuple[int, int]:
        return (self.left, self.right)


@torch.compiler.disable
def plait_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | IntervalMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> IntervalMask | None:
    """Builds the mask that every attention layer of one forward shares; None for plain causal attention.

    `attention_mask` is the 2-D padding mask, bool `[batch, positions]`, True for real tokens. Patterns that
    transformers composes itself (causal, sliding window, full, packed sequences) are read from the mask function
    without evaluating it; any other is evaluated densely and has to give intervals. Values are read on the host
    once, and only where a padding mask or an unknown pattern has to be checked. torch.compile leaves a graph here and
    compiles the layers.
    """
    if isinstance(attention_mask, IntervalMask):  # prepared before the forward, as generate() does for static caches
        return attention_mask
    pattern = None if use_vmap else _recognise(mask_function)
    q_start = q_offset - kv_offset
    if pattern is not None and not pattern.causal and pattern.window != (-1, -1):
        # The window of a full mask counts from equal positions, plait's from the last query and key.
        if isinstance(q_start, torch.Tensor) or q_start + q_length != kv_length:
            pattern = None
    if pattern is None or (pattern.by_position and pattern.sequence_ids is None):
        return _evaluate(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap,
                         device)  # fmt: skip
    ids = pattern.sequence_ids
    if ids is not None and bool((ids != ids[:, :1]).any()):  # a compiled caller passes ids also of single sequences
        return from_sequence_ids(ids.expand(batch_size, -1), causal=pattern.causal, window=pattern.window)
    real = _padding(attention_mask, batch_size, kv_length, kv_offset)
    if real is not None:
        real = _checked(real)
    padded = real is not None
    if not padded:
        ends_together = not isinstance(q_start, torch.Tensor) and q_start + q_length == kv_length
        if ends_together or not pattern.causal:
            plain_causal = pattern.causal and pattern.window == (-1, -1)
            return (
                None if plain_causal else IntervalMask(batch_size, q_length, kv_length, pattern.causal, pattern.window)
            )
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)  # keys of a static cache
    return from_padding(real, q_length, q_start, causal=pattern.causal, window=pattern.window, padded=padded)


def _padding(attention_mask, batch: int, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    """The padding mask of the keys at hand, `[batch, kv_length]` bool; positions past the given mask are no keys."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].bool().expand(batch, -1)


def _checked(real: torch.Tensor) -> torch.Tensor | None:
    """None when nothing is padded; refuses rows whose real keys are not one run. One read on the host."""
    joints = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0]  # runs of real keys in each row
    all_real, runs = torch.stack([real.all().long(), joints.max()]).tolist()
    if all_real:
        return None
    if runs > 1:
        row = int(joints.argmax())
        raise refuse_mask(
            f"row {row} has padding between its tokens (a right-padded prompt cannot be continued from a cache: "
            "pad prompts on the left)"
        )
    return real


def _evaluate(
    batch, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device
) -> IntervalMask:
    """The slow path: transformers' dense bool mask, reduced to intervals or refused."""
    dense = masking_utils.sdpa_mask(
        batch_size=batch,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    real = _padding(attention_mask, batch, kv_length, kv_offset)
    q_start = q_offset - kv_offset
    if real is not None and not isinstance(q_start, torch.Tensor) and q_start + q_length == kv_length:
        dense = dense & real[:, None, q_start:, None]  # what padding tokens see does not matter: nothing
    return from_dense(dense, batch)


def _recognise(function: Callable) -> _Pattern | None:
    """The pattern of a mask function that transformers' own factories made, None for any other."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    cells = {}
    if function.__closure__:
        cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__), strict=True))
    factory = function.__qualname__.split(".")[0]
    if factory == "causal_mask_function":
        return _Pattern(causal=True)
    if factory == "bidirectional_mask_function":
        return _Pattern()
    if factory == "sliding_window_overlay":
        return _Pattern(left=cells["sliding_window"] - 1)
    if factory == "sliding_window_bidirectional_overlay":
        return _Pattern(left=cells["sliding_window"], right=cells["sliding_window"])
    if factory == "packed_sequence_mask_function":
        return _Pattern(sequence_ids=cells["packed_sequence_mask"])
    if factory == "remap_positions_for_packed_sequence":
        inner = _recognise(cells["mask_function"])
        return None if inner is None else _Pattern(inner.causal, inner.left, inner.right, by_position=True)
    if factory == "and_masks":
        return _intersection([_recognise(part) for part in cells["mask_functions"]])
    return None


def _intersection(parts: list[_Pattern | None]) -> _Pattern | None:
    if any(part is None for part in parts):
        return None
    ids = [part.sequence_ids for part in parts if part.sequence_ids is not None]
    if len(ids) > 1:
        return None
    causal = any(part.causal for part in parts)
    left = min((part.left for part in parts if part.left >= 0), default=-1)
    right = min((part.right for part in parts if part.right >= 0), default=-1)
    if causal:
        right = 0 if left >= 0 else -1
    return _Pattern(causal, left, right, ids[0] if ids else None, any(part.by_position for part in parts))
