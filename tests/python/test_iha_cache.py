"""Interleaved Head Attention over a cache, mixed and raw, against float64 and against starting over."""

import math

import oracle
import plait
import pytest
import torch
from cache_calls import iha_setup, int32

pytestmark = pytest.mark.usefixtures("one_thread")


IHA = {
    "plain": {},
    "rope": {"rope": "half", "causal": True},
    "rope pairs, window": {"rope": "pairs", "causal": True, "window": (6, 0)},
    "softcap, sinks": {"causal": True, "softcap": 2.0, "sinks": True, "scale": 0.4},
    "bshd": {"layout": "bshd", "causal": True, "rope": "half"},
    "one pseudo-head": {"P": 1, "causal": True},
    "one key head": {"Hk": 1, "causal": True, "rope": "half"},
}


@pytest.mark.parametrize("kind", ["mixed", "raw"])
@pytest.mark.parametrize("case", IHA)
def test_iha_decode_equals_starting_over(case, kind):
    o = dict(IHA[case])
    shape = {name: o.pop(name) for name in ("P", "Hk") if name in o}
    layout, style, sinks = o.pop("layout", "bhsd"), o.pop("rope", None), o.pop("sinks", False)
    q, k, v, weights, caches = iha_setup(kind, layout=layout, **shape)
    o["sinks"] = torch.randn(4) if sinks else None
    tables = oracle.rope_tables(24, 5) if style else None
    rotation = {"rope": tables, "rope_style": style or "half"}
    shuffle = (lambda x: x) if layout == "bhsd" else (lambda x: x.transpose(1, 2).contiguous())
    lengths = int32(0, 0)
    for count in (7, 1, 1, 3, 1):
        begin = int(lengths[0])
        end = begin + count
        step = [shuffle(x[:, :, begin:end]) for x in (q, k, v)]
        out, lse = plait.iha_attention_with_kvcache(
            *step, caches, *weights, cache_kind=kind, cache_seqlens=lengths, layout=layout, return_lse=True, **rotation,
            **o,
        )  # fmt: skip
        expected = oracle.iha(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], *weights, mode="joint", **rotation, **o)
        oracle.assert_close(shuffle(out) if layout == "bshd" else out, expected[0], torch.float32)
        oracle.assert_close(lse, expected[1], torch.float32)
        again = plait.iha_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], *weights, **rotation, **o)
        torch.testing.assert_close(shuffle(out) if layout == "bshd" else out, again, rtol=1e-5, atol=1e-5)
        lengths += count
        written = caches[0][:, :, :end] if layout == "bhsd" else caches[0][:, :end]
        assert written.isfinite().all() and int(caches[0].isnan().sum()) == caches[0].numel() - written.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mixed", "raw"])
def test_iha_decode_in_half_types(kind, dtype):
    q, k, v, weights, caches = iha_setup(kind, dtype=dtype)
    rope = oracle.rope_tables(24, 8)
    options = {"cache_kind": kind, "causal": True, "rope": rope}
    plait.iha_attention_with_kvcache(q[:, :, :19], k[:, :, :19], v[:, :, :19], caches, *weights, cache_seqlens=0,
                                     **options)  # fmt: skip
    out = plait.iha_attention_with_kvcache(q[:, :, 19:], k[:, :, 19:], v[:, :, 19:], caches, *weights,
                                           cache_seqlens=19, **options)  # fmt: skip
    expected, _ = oracle.iha(q[:, :, 19:], k, v, *weights, mode="joint", causal=True, rope=rope)
    # The mixed tensors are rounded to the cache's dtype, as in iha_attention: hold it to that function's error.
    at_once = plait.iha_attention(q[:, :, 19:], k, v, *weights, causal=True, rope=rope)
    assert oracle.rms_error(out, expected) <= 1.5 * oracle.rms_error(at_once, expected)


@pytest.mark.parametrize("kind", ["mixed", "raw"])
def test_iha_ragged_rows_and_no_new_keys(kind):
    q, k, v, weights, caches = iha_setup(kind, B=3)
    big = tuple(torch.full((5, *cache.shape[1:]), math.nan) for cache in caches)
    rows, options = int32(4, 0, 2), {"cache_kind": kind, "causal": True}
    for b, length in enumerate((11, 1, 5)):
        one = [x[b : b + 1, :, :length] for x in (q, k, v)]
        plait.iha_attention_with_kvcache(*one, big, *weights, cache_seqlens=0, cache_batch_idx=rows[b : b + 1],
                                         **options)  # fmt: skip
    new = [x[:, :, 12:13] for x in (q, k, v)]
    lengths = int32(11, 1, 5)
    out = plait.iha_attention_with_kvcache(*new, big, *weights, cache_seqlens=lengths, cache_batch_idx=rows, **options)
    again = plait.iha_attention_with_kvcache(new[0], None, None, big, *weights, cache_seqlens=lengths + 1,
                                             cache_batch_idx=rows, **options)  # fmt: skip
    assert torch.equal(out, again)
    for b, length in enumerate((11, 1, 5)):
        keys, values = (torch.cat([x[b : b + 1, :, :length], x[b : b + 1, :, 12:13]], 2) for x in (k, v))
        expected, _ = oracle.iha(new[0][b : b + 1], keys, values, *weights, mode="joint", causal=True)
        oracle.assert_close(out[b : b + 1], expected, torch.float32)
