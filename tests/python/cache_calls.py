"""Calls over key-value caches, with NaN where nothing may be read. Called by the tests of caches."""

import dataclasses
import math

import oracle
import plait
import torch


@dataclasses.dataclass
class Call:
    """The tensors of one call. Caches hold NaN where nothing may be read."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: list[int]
    options: dict

    def run(self, **changes):
        return plait.attention_with_kvcache(self.q, self.k_cache, self.v_cache, **{**self.options, **changes})


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(lengths=(17, 0, 30), Hq=4, Hk=2, Sq=2, Sn=2, D=16, Dv=12, capacity=40, page=0, rows=None, dtype=torch.float32,
         layout="bhsd", strided=False, rope_dims=None, sinks=False, **options):  # fmt: skip
    """rows: cache_batch_idx. page: the page size of a paged cache, 0 for a dense one."""
    heads_first = lambda x: x if layout == "bhsd" else x.transpose(1, 2).contiguous()  # noqa: E731
    B = len(lengths)
    q, k_new, v_new = (
        heads_first(torch.randn(B, H, S, d).to(dtype)) for H, S, d in ((Hq, Sq, D), (Hk, Sn, D), (Hk, Sn, Dv))
    )
    if page:
        blocks = -(-capacity // page)
        shape, table = (B * blocks + 2, page, Hk), torch.randperm(B * blocks + 2)[: B * blocks].view(B, blocks).int()
        options["block_table"] = table
    else:
        count = B if rows is None else 2 + max(rows)
        shape = (count, Hk, capacity) if layout == "bhsd" else (count, capacity, Hk)
    whole = torch.full((*shape, D + Dv + 3), math.nan, dtype=dtype)
    k_cache, v_cache = whole[..., :D], whole[..., D : D + Dv]  # one tensor, both with gaps
    if not strided:
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    if rows is not None:
        options["cache_batch_idx"] = int32(*rows)
    for b, length in enumerate(lengths):
        for cache in (k_cache, v_cache):
            write(cache, b, 0, torch.randn(Hk, length, cache.shape[-1]).to(dtype), layout, options)
    if Sn:
        options |= {"k_new": k_new, "v_new": v_new}
    if rope_dims is not None:
        options["rotary_cos"], options["rotary_sin"] = oracle.rope_tables(capacity, rope_dims // 2)
    if sinks:
        options["sinks"] = torch.randn(Hq)
    return Call(q, k_cache, v_cache, list(lengths), options | {"cache_seqlens": int32(*lengths), "layout": layout})


def places(cache, b, start, count, layout, options):
    """Views `[Hk, D]` of positions start ... of sequence b, in a dense or paged cache."""
    for position in range(start, start + count):
        if "block_table" in options:
            page = cache.shape[1]
            yield cache[options["block_table"][b, position // page], position % page]
        else:
            row = cache[int(options["cache_batch_idx"][b]) if "cache_batch_idx" in options else b]
            yield row[:, position] if layout == "bhsd" else row[position]


def write(cache, b, start, values, layout, options):
    for i, place in enumerate(places(cache, b, start, values.shape[1], layout, options)):
        place.copy_(values[:, i])


def read(cache, b, count, layout, options):
    """[1, Hk, count, D]"""
    found = list(places(cache, b, 0, count, layout, options))
    return torch.stack(found, 1)[None] if found else cache.new_zeros(1, options["heads"], 0, cache.shape[-1])


def iha_setup(kind, Hq=4, Hk=2, P=3, D=16, Dv=12, S_max=32, B=2, layout="bhsd", dtype=torch.float32):
    q, k, v = (torch.randn(B, H, 20, d).to(dtype) for H, d in ((Hq, D), (Hk, D), (Hk, Dv)))
    weights = [torch.eye(H)[:, None] + 0.3 * torch.randn(H, P, H) for H in (Hq, Hk, Hk)]
    pseudo = (P,) if kind == "mixed" else ()
    leading = (B, Hk, S_max) if layout == "bhsd" else (B, S_max, Hk)
    caches = tuple(torch.full((*leading, *pseudo, d), math.nan, dtype=dtype) for d in (D, Dv))
    return q, k, v, weights, caches
