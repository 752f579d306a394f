"""Attention masks of a whole batch as row intervals: padding, packed sequences, windows, dense 4-D masks.

Called by integrations.transformers (masks and attention) and integrations.iha_layers.

A mask is a causal flag, a window and, where sequences do not fill their rows, cumulative lengths over the
flattened [batch * length] tokens. Padding is given to sequences with no keys (its queries) and no queries (its
keys): nothing is gathered, and no work is done for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

# Queries of a step that go through the cache kernels, which share keys out over the processor instead of rows.
_MOST_STEP_QUERIES = 16


@dataclass(frozen=True)
class IntervalMask:
    """One interval of keys per query row, for every row of a batch.

    `cu_seqlens_q` and `cu_seqlens_k` are int32 `[sequences + 1]` over the flattened `[batch * q_length]` and
    `[batch * kv_length]` tokens, or None when each row is one whole sequence. `window` is `(left, right)`, inclusive,
    -1 = unbounded. Inside a sequence the last query meets the last key, as everywhere in plait.

    A step of a few queries behind the keys of a cache also says, for the kernels of caches, how many keys each row has
    up to its last query and, where rows are padded on the left, the first of them.
    """

    batch: int
    q_length: int
    kv_length: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    cu_seqlens_q: torch.Tensor | None = None  # [sequences + 1] int32
    cu_seqlens_k: torch.Tensor | None = None  # [sequences + 1] int32
    key_counts: torch.Tensor | None = None  # [batch] int32, of a step
    first_keys: torch.Tensor | None = None  # [batch] int32, of a step with padding
    _tables: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the dense mask this stands for: `(batch, 1, q_length, kv_length)`."""
        return (self.batch, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        """Always 4: callers that look at the rank treat it as a prepared mask."""
        return 4

    @property
    def packed(self) -> bool:
        """Whether attention has to run on the flattened tokens."""
        return self.cu_seqlens_q is not None

    def with_positions(self) -> IntervalMask:
        """The same mask with padding in sequences of its own keys, so that every query has a position to rotate by.

        Padding is then computed among itself. Queries of a sequence without keys join the keys that follow.
        """
        if not self.packed:
            return self
        cu_q, cu_k = self.cu_seqlens_q, self.cu_seqlens_k
        split = (cu_k.diff()[:-1] == 0) & (cu_q.diff()[1:] == 0)  # [sequences - 1]: queries first, their keys next
        joined = torch.cat([cu_q[:1], torch.where(split, cu_q[:-2], cu_q[1:-1]), cu_q[-1:]])
        return replace(self, cu_seqlens_q=joined, key_counts=None, first_keys=None)

    def block_table(self, row_stride: int) -> torch.Tensor:
        """The keys of a padded step as pages of one key, int32 `[batch, kv_length]`: key `i` of row `b` is page
        `b * row_stride + first_keys[b] + i`. Kept for the layers that follow."""
        table = self._tables.get(row_stride)
        if table is None:
            device = self.first_keys.device
            rows = torch.arange(self.batch, dtype=torch.int32, device=device) * row_stride
            keys = torch.arange(self.kv_length, dtype=torch.int32, device=device)
            table = (rows + self.first_keys)[:, None] + keys
            if not torch.compiler.is_compiling():
                self._tables[row_stride] = table
        return table

    def to(self, device, **kwargs) -> IntervalMask:
        """A copy with its cumulative lengths on `device` (models spread over several devices move their masks)."""
        if not self.packed:
            return self
        names = ("cu_seqlens_q", "cu_seqlens_k", "key_counts", "first_keys")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: x if x is None else x.to(device, **kwargs) for name, x in tensors.items()}
        return replace(self, _tables={}, **moved)


def refuse_mask(got: str) -> ValueError:
    """The error for a mask that is no interval of keys per query row."""
    return ValueError(
        f"attention_mask: {got}; plait supports masks that give each query row one interval of keys: causal or full, "
        "with a window, left- or right-padded rows and packed sequences. Use attn_implementation='sdpa' or "
        "'flex_attention' for other masks"
    )


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Cumulative int32 lengths with a leading 0, from `[batch, segments]` lengths."""
    total = lengths.flatten().cumsum(0)
    return torch.nn.functional.pad(total, (1, 0)).to(torch.int32)


def from_padding(
    real: torch.Tensor,  # [batch, kv_length] bool, True for real keys
    q_length: int,
    q_start: int | torch.Tensor,  # index of the first query on the key axis
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    padded: bool = True,  # False: all keys are real
) -> IntervalMask:
    """The mask of a padded batch, each row one run of real keys; no data leaves the device.

    With causal or window, query i stands at key index `q_start + i`: the queries of a row are split where its keys
    are, and keys past the last query are left out. Otherwise all queries of a row see all its real keys.
    """
    batch, kv_length = real.shape
    count = real.sum(-1)  # [batch]
    first = real.to(torch.uint8).argmax(-1)
    aligned = causal or window != (-1, -1)
    key_end = q_start + q_length if aligned else kv_length
    begin, end = first.clamp(max=key_end), (first + count).clamp(max=key_end)
    zero = torch.zeros_like(begin)
    if aligned:
        q_begin, q_end = (begin - q_start).clamp(0, q_length), (end - q_start).clamp(0, q_length)
    else:
        q_begin, q_end = zero, zero + q_length
    # Five sequences per row: queries of the left padding, its keys, the real run, right padding likewise.
    lengths_q = torch.stack([q_begin, zero, q_end - q_begin, q_length - q_end, zero], -1)
    lengths_k = torch.stack([zero, begin, end - begin, zero, kv_length - end], -1)
    mask = IntervalMask(batch, q_length, kv_length, causal, window, _starts(lengths_q), _starts(lengths_k))
    if not causal or q_length > (1 if padded else _MOST_STEP_QUERIES):
        return mask
    # A query of padding sees some key: nobody looks at what it gets.
    counts, first = (end - begin).clamp(min=1), begin.clamp(max=kv_length - 1)
    return replace(mask, key_counts=counts.to(torch.int32), first_keys=first.to(torch.int32) if padded else None)


def from_sequence_ids(
    ids: torch.Tensor,  # [batch, length]: tokens of one sequence carry one number
    *,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
) -> IntervalMask:
    """The mask of packed sequences, several in each row, each contiguous."""
    batch, length = ids.shape
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = new.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)
    return IntervalMask(batch, length, length, causal, window, cu_seqlens, cu_seqlens)


def from_dense(mask: torch.Tensor, batch: int) -> IntervalMask:
    """Reduces a dense mask `[batch or 1, heads or 1, q_length, kv_length]` (bool, or float with 0 and -inf) to
    intervals, or refuses it. Reads the mask on the host: meant to run once per forward."""
    visible = _visible(mask)
    if visible.shape[0] not in (1, batch):
        raise refuse_mask(f"batch of {visible.shape[0]} for {batch} rows")
    if not bool((visible == visible[:, :1]).all()):
        raise refuse_mask("it differs between heads")
    visible = visible[:, 0].expand(batch, -1, -1)
    kv_length = visible.shape[-1]
    count = visible.sum(-1)  # [batch, q_length]
    lo = visible.to(torch.uint8).argmax(-1)
    hi = kv_length - visible.flip(-1).to(torch.uint8).argmax(-1)
    empty = count == 0
    holes = ((count != hi - lo) & ~empty).nonzero()
    if len(holes):
        raise refuse_mask(f"query {int(holes[0, 1])} of row {int(holes[0, 0])} sees keys with holes between them")
    rows = _Rows(lo.cpu(), hi.cpu(), empty.cpu(), kv_length)
    reduced = _reduce_causal(rows, mask.device) or _reduce_full(rows, mask.device)
    if reduced is None:
        raise refuse_mask("its intervals are neither causal nor the same for all queries of a row")
    return reduced


def _visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.ndim != 4:
        raise refuse_mask(
            f"a tensor of shape {tuple(mask.shape)} where [batch, heads, q_length, kv_length] is expected"
        )
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise refuse_mask(f"dtype {mask.dtype} where bool or a floating dtype is expected")
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise refuse_mask("it adds a bias to the scores")
    return visible


@dataclass
class _Rows:
    """Intervals `[lo, hi)` of a dense mask, per batch row and query, on the host."""

    lo: torch.Tensor  # [batch, q_length]
    hi: torch.Tensor  # [batch, q_length]
    empty: torch.Tensor  # [batch, q_length] bool
    kv_length: int


def _reduce_causal(rows: _Rows, device: torch.device) -> IntervalMask | None:
    """Causal masks: sequences start where a row sees only itself; what they do not explain is the window."""
    batch, q_length = rows.lo.shape
    offset, host = rows.kv_length - q_length, rows.lo.device
    if offset < 0 or q_length == 0:
        return None
    own = torch.arange(q_length, device=host) + offset  # the key index of each query
    if not bool(((rows.hi == own + 1) | rows.empty).all()):
        return None
    cut = torch.zeros(batch, rows.kv_length, dtype=torch.bool, device=host)
    cut[:, offset:] = (rows.lo == own) & ~rows.empty
    cut[:, offset + 1 :] |= rows.empty[:, 1:] != rows.empty[:, :-1]
    first = torch.where(rows.empty[:, 0], offset, rows.lo[:, 0])
    cut[torch.arange(batch, device=host), first] = True
    cut[:, 0] = True
    starts = torch.where(cut, torch.arange(rows.kv_length, device=host), 0).cummax(-1).values[:, offset:]
    left = int(torch.where(rows.empty, 0, own - rows.lo).max())
    for window in ((-1, -1), (left, 0)):
        expected = starts if window[0] < 0 else torch.maximum(starts, own - window[0])
        if bool(((rows.lo == expected) | rows.empty).all()):
            return _from_cuts(rows, cut, window, device)
    return None


def _from_cuts(rows: _Rows, cut: torch.Tensor, window: tuple[int, int], device: torch.device) -> IntervalMask:
    batch, q_length = rows.lo.shape
    offset = rows.kv_length - q_length
    lengths_q, lengths_k = [], []
    for row in range(batch):
        bounds = [*cut[row].nonzero().flatten().tolist(), rows.kv_length]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            queries = max(end - offset, 0) - max(begin - offset, 0)
            if queries and bool(rows.empty[row, end - 1 - offset]):
                lengths_q += [queries, 0]
                lengths_k += [0, end - begin]
            else:
                lengths_q.append(queries)
                lengths_k.append(end - begin)
    plain = IntervalMask(batch, q_length, rows.kv_length, True, window)
    if len(lengths_k) == batch:
        return plain
    cu_q, cu_k = (
        _starts(torch.tensor(lengths, device=rows.lo.device)).to(device) for lengths in (lengths_q, lengths_k)
    )
    return replace(plain, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def _reduce_full(rows: _Rows, device: torch.device) -> IntervalMask | None:
    """Masks over keys alone: all queries of a batch row see one and the same interval."""
    batch, q_length = rows.lo.shape
    same = (rows.lo == rows.lo[:, :1]) & (rows.hi == rows.hi[:, :1]) & (rows.empty == rows.empty[:, :1])
    if q_length == 0 or not bool(same.all()):
        return None
    index = torch.arange(rows.kv_length, device=rows.lo.device)
    real = (index >= rows.lo[:, :1]) & (index < rows.hi[:, :1]) & ~rows.empty[:, :1]
    if bool(real.all()):
        return IntervalMask(batch, q_length, rows.kv_length, False)
    return from_padding(real.to(device), q_length, 0, causal=False)
