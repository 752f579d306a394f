"""Cases over a key-value cache that users of other attention libraries reported in public; see test_public_cases.py."""

import math

import oracle
import plait
import pytest
import torch


def paged_cache(lengths, page, *, Hk=2, D=16, Dv=16, spare=3, dtype=torch.float32):
    """Pools with the keys of `lengths` on shuffled pages, NaN elsewhere, and the table, whose unused entries are -1."""
    blocks = [-(-length // page) for length in lengths]
    pages = sum(blocks) + spare
    k_pool, v_pool = (torch.full((pages, page, Hk, d), math.nan, dtype=dtype) for d in (D, Dv))
    ids = torch.randperm(pages).int()
    table = torch.full((len(lengths), max([*blocks, 1])), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        table[b, : blocks[b]], ids = ids[: blocks[b]], ids[blocks[b] :]
        for position in range(length):
            place = int(table[b, position // page]), position % page
            k_pool[place], v_pool[place] = torch.randn(Hk, D).to(dtype), torch.randn(Hk, Dv).to(dtype)
    return k_pool, v_pool, table


def gathered(pool, table, b, length):
    """[1, Hk, length, D] of sequence b."""
    page = pool.shape[1]
    rows = [pool[int(table[b, i // page]), i % page] for i in range(length)]
    return torch.stack(rows, 1)[None] if rows else pool.new_zeros(1, pool.shape[2], 0, pool.shape[3])


def check_paged(q, k_pool, v_pool, table, lengths, out, lse, **options):
    for b, length in enumerate(lengths):
        keys, values = gathered(k_pool, table, b, length), gathered(v_pool, table, b, length)
        expected, expected_lse = oracle.attention(q[b : b + 1], keys, values, **options)
        tolerance = 2e-6 if q.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out[b : b + 1].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[b : b + 1].double(), expected_lse, atol=4e-6, rtol=1e-6)


def lengths_tensor(lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def test_rows_before_the_first_key_have_lse_minus_infinity():  # flashinfer-ai/flashinfer#4452
    lengths = [2, 5, 0]
    k_pool, v_pool, table = paged_cache(lengths, 4)
    q = torch.randn(3, 4, 5, 16)
    out, lse = plait.attention_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=lengths_tensor(lengths), block_table=table, causal=True, return_lse=True
    )
    assert torch.isneginf(lse[0, :, :3]).all() and torch.isneginf(lse[2]).all() and torch.isfinite(lse[1]).all()
    assert (out[0, :, :3] == 0).all() and (out[2] == 0).all()
    check_paged(q, k_pool, v_pool, table, lengths, out, lse, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_cache_row(causal):  # Dao-AILab/flash-attention#978
    k_cache, v_cache = torch.full((2, 2, 6, 8), math.nan), torch.full((2, 2, 6, 8), math.nan)
    k_cache[1], v_cache[1] = torch.randn(2, 2, 6, 8)
    q = torch.randn(2, 2, 1, 8)
    out, lse = plait.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths_tensor([0, 6]), causal=causal, return_lse=True
    )
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    expected, expected_lse = oracle.attention(q[1:], k_cache[1:], v_cache[1:])
    torch.testing.assert_close(out[1:].double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse[1:].double(), expected_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("length, new", [(13, 0), (12, 1), (2**31 - 1, 0), (-1, 1)])
def test_lengths_past_the_pages_are_refused_and_nothing_is_written(length, new):  # Dao-AILab/flash-attention#2711
    k_pool, v_pool, table = paged_cache([12, 12], 4)
    before = k_pool.clone(), v_pool.clone()
    fresh = {"k_new": torch.randn(2, 2, new, 16), "v_new": torch.randn(2, 2, new, 16)} if new else {}
    with pytest.raises(ValueError, match=rf"^cache_seqlens: got {length} for sequence 1 .*expected 0 to {12 - new}"):
        plait.attention_with_kvcache(
            torch.randn(2, 4, 1, 16),
            k_pool,
            v_pool,
            cache_seqlens=lengths_tensor([3, length]),
            block_table=table,
            **fresh,
        )
    for pool, old in zip((k_pool, v_pool), before, strict=True):
        torch.testing.assert_close(pool, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_id", [-1, 9, 2**31 - 1])
def test_page_ids_outside_the_pool_are_refused(page_id):  # Dao-AILab/flash-attention#2711
    k_pool, v_pool, table = paged_cache([12, 12], 4)
    assert k_pool.shape[0] == 9
    table[1, 2] = page_id
    with pytest.raises(
        ValueError, match=rf"^block_table: got page {page_id} for block 2 of sequence 1, expected 0 to 8"
    ):
        plait.attention_with_kvcache(
            torch.randn(2, 4, 1, 16), k_pool, v_pool, cache_seqlens=lengths_tensor([12, 12]), block_table=table
        )


@pytest.mark.parametrize("append", [False, True])
def test_pages_past_2_to_the_31_elements(append):  # vllm-project/vllm#50427, flashinfer-ai/flashinfer#3136
    pages, page, Hk, D = 9, 2, 2, 8
    stride = 2**28  # page 8 begins at 2^31
    memory = torch.empty((pages - 1) * stride + 2**12, dtype=torch.bfloat16)  # address space; few pages are touched
    k_pool, v_pool = (torch.as_strided(memory, (pages, page, Hk, D), (stride, Hk * D, D, 1), at) for at in (0, 2**11))
    table = torch.tensor([[8, 3], [7, 1]], dtype=torch.int32)
    for pool in (k_pool, v_pool):
        for page_id in table.flatten().tolist():
            pool[page_id] = torch.randn(page, Hk, D)
    lengths, q = [3, 4], torch.randn(2, 4, 1, D).bfloat16()
    fresh = {}
    if append:
        lengths = [1, 3]
        fresh = {"k_new": torch.randn(2, Hk, 1, D).bfloat16(), "v_new": torch.randn(2, Hk, 1, D).bfloat16()}
    out, lse = plait.attention_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=lengths_tensor(lengths), block_table=table, return_lse=True, **fresh
    )
    if append:
        assert torch.equal(k_pool[8, 1], fresh["k_new"][0, :, 0]) and torch.equal(v_pool[1, 1], fresh["v_new"][1, :, 0])
        lengths = [2, 4]
    check_paged(q, k_pool, v_pool, table, lengths, out, lse)


@pytest.mark.parametrize("rows", [1, 4])
def test_split_counts_give_one_result(rows):  # Dao-AILab/flash-attention#1217, #2573, vllm-project/flash-attention#176
    lengths = [rows, 700, 65, 256]  # most splits of the short ones are empty
    k_pool, v_pool, table = paged_cache(lengths, 16)
    q = torch.randn(4, 4, rows, 16)
    call = {"cache_seqlens": lengths_tensor(lengths), "block_table": table, "causal": True, "return_lse": True}
    for splits in (None, 1, 2, 7):
        split_size = None if splits is None else -(-max(lengths) // splits)
        out, lse = plait.attention_with_kvcache(q, k_pool, v_pool, split_size=split_size, **call)
        assert lse.shape == (4, 4, rows)
        check_paged(q, k_pool, v_pool, table, lengths, out, lse, causal=True)


def test_many_random_steps_are_finite():  # pytorch/torchtitan#3235
    for _ in range(150):
        page, rows = int(torch.randint(1, 40, ())), int(torch.randint(1, 5, ()))
        lengths = (torch.randint(0, 300, (3,)) + rows).tolist()
        k_pool, v_pool, table = paged_cache(lengths, page, Hk=1, D=8, Dv=8)
        split_size = [None, 300, 150, 43][int(torch.randint(4, ()))]
        out, lse = plait.attention_with_kvcache(
            torch.randn(3, 2, rows, 8), k_pool, v_pool, cache_seqlens=lengths_tensor(lengths), block_table=table,
            causal=True, split_size=split_size, return_lse=True,
        )  # fmt: skip
        assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_a_sequence_alone_and_in_a_batch():  # vllm-project/flash-attention#169, Dao-AILab/flash-attention#2450
    lengths = [513, 30, 129]
    k_pool, v_pool, table = paged_cache(lengths, 32, dtype=torch.bfloat16)
    q = torch.randn(3, 4, 1, 16).bfloat16()
    call = {"split_size": 128, "causal": True, "return_lse": True}
    together = plait.attention_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=lengths_tensor(lengths), block_table=table, **call
    )
    for b in range(3):
        one = slice(b, b + 1)
        alone = plait.attention_with_kvcache(
            q[one], k_pool, v_pool, cache_seqlens=lengths_tensor(lengths[one]), block_table=table[one], **call
        )
        assert all(torch.equal(x, y[one]) for x, y in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_lse_is_the_natural_log_of_the_scaled_scores(kind):  # pytorch/pytorch#181645, flashinfer-ai/flashinfer#4485
    k_pool, v_pool, table = paged_cache([100], 16, D=64)
    keys, q = gathered(k_pool, table, 0, 100), torch.randn(1, 2, 1, 64)
    expected = torch.logsumexp(q.double() @ keys.double().transpose(-1, -2) / 8, -1)
    call = {"cache_seqlens": 100, "return_lse": True}
    if kind == "dense":
        _, lse = plait.attention_with_kvcache(q, keys, gathered(v_pool, table, 0, 100), **call)
    else:
        _, lse = plait.attention_with_kvcache(q, k_pool, v_pool, block_table=table, **call)
    torch.testing.assert_close(lse.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("page", [1, 7, 16, 256, 300])
def test_any_page_size(page):  # Dao-AILab/flash-attention#824, flashinfer-ai/flashinfer#320
    lengths = [5, 0, 290]
    k_pool, v_pool, table = paged_cache(lengths, page)
    q = torch.randn(3, 6, 2, 16)
    out, lse = plait.attention_with_kvcache(
        q, k_pool, v_pool, cache_seqlens=lengths_tensor(lengths), block_table=table, return_lse=True
    )
    check_paged(q, k_pool, v_pool, table, lengths, out, lse)
