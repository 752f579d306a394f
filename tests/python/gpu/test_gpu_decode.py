"""Cache steps and few queries on tensor cores: every case of test_kv_cache.py in half precision with head dims that
cuda_mma takes, graphs, fixed splits. Called by pytest."""

import math
import re

import plait
import pytest
import torch
from cache_calls import make
from gpu_calls import decoded_in_a_graph
from on_gpu import suite

CPU = suite("test_kv_cache", skip={})
CASES = {**CPU["PLAIN"], "pages of 1": {"page": 1, "capacity": 41}, "pages of 3": {"page": 3, "causal": True},
         "pages of 16": {"page": 16, "causal": True, "window": (20, 0), "sinks": True, "lengths": (255, 0, 30),
                         "capacity": 300, "rope_dims": 10, "Sn": 5, "Sq": 3},
         "pages of 64": {"page": 64, "capacity": 700, "lengths": (640, 1, 300), "Sq": 1, "Sn": 1},
         "many heads of a group": {"Hq": 24, "Hk": 1, "causal": True, "Sq": 3, "Sn": 3}}  # fmt: skip
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cuda_sm90 is for Hopper")


@HALF
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)], ids=str)
def test_cache_steps_on_tensor_cores(case, dims, dtype):
    options = {**dict(zip(("D", "Dv"), dims, strict=True)), **CASES[case], "dtype": dtype, "backend": "cuda_mma"}
    options |= {name: options[name] // 8 * 8 for name in ("D", "Dv")}
    CPU["check"](make(**options))


@HALF
@pytest.mark.parametrize("case", [name for name, options in CASES.items() if not options.get("page")])
@pytest.mark.parametrize("dims", [(264, 264), (512, 512), (576, 320)], ids=str)
def test_cache_steps_of_large_head_dims(case, dims, dtype):
    options = {**CASES[case], **dict(zip(("D", "Dv"), dims, strict=True)), "dtype": dtype, "backend": "cuda_mma"}
    CPU["check"](make(**options))


@HALF
@pytest.mark.parametrize("D, backend", [(64, "cuda_mma"), (64, "auto"), (128, "auto"), (512, "cuda_mma")])
def test_prompts_and_pieces_of_them_go_into_a_cache(D, backend, dtype):
    for lengths, Sn in (((0, 0, 0), 150), ((37, 150, 3), 130)):
        call = make(D=D, Dv=D, Hq=4, Hk=2, lengths=lengths, capacity=300, Sq=Sn, Sn=Sn, causal=True, rope_dims=32,
                    dtype=dtype, backend=backend, strategy="split_q" if D <= 256 else "auto")  # fmt: skip
        CPU["check"](call)


@HALF
@pytest.mark.parametrize("D", [64, 512])
def test_prompts_over_ranges_of_keys(D, dtype):
    for lengths, Sn in (((0, 0, 0), 150), ((37, 150, 3), 130)):
        CPU["check"](make(D=D, Dv=D, Hq=4, Hk=2, lengths=lengths, capacity=300, Sq=Sn, Sn=Sn, window=(40, 3),
                          sinks=True, dtype=dtype, backend="cuda_mma", strategy="split_kv"))  # fmt: skip


@HOPPER
@HALF
@pytest.mark.parametrize("split_size", [None, 100])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("Hq, D", [(4, 128), (2, 64), (10, 256)])
def test_pieces_of_prompts_over_ranges_of_row_tiles(Hq, D, layout, split_size, dtype):
    named = {"backend": "cuda_sm90", "strategy": "split_kv", "split_size": split_size, "layout": layout}
    for lengths, options in (((600, 3, 250), {"causal": True, "sinks": True}), ((0, 700, 41), {"window": (150, 3)})):
        CPU["check"](make(D=D, Dv=D - 8, Hq=Hq, Hk=2, lengths=lengths, capacity=800, Sq=37, Sn=37, dtype=dtype,
                          **named, **options))  # fmt: skip


@HOPPER
@HALF
def test_few_queries_beside_many_keys_fill_hopper(dtype):
    q, k, v = (torch.randn(1, H, S, 128).to(dtype) for H, S in ((32, 100), (8, 5000), (8, 5000)))
    for options in ({"causal": True}, {"window": (900, 5), "softcap": 20.0}, {"sinks": torch.randn(32)}):
        text = plait.explain(q, k, v, **options)
        assert "backend    cuda_sm90" in text and "strategy   split_kv" in text and "splits" in text
        out, lse = plait.flash_attention(q, k, v, **options, return_lse=True)
        again = plait.flash_attention(q, k, v, **options)
        assert torch.equal(out, again)
        exact, exact_lse = plait.flash_attention(q, k, v, **options, return_lse=True, backend="cuda_naive")
        torch.testing.assert_close(out, exact, rtol=4 * torch.finfo(dtype).eps, atol=2e-3)
        torch.testing.assert_close(lse, exact_lse, rtol=1e-4, atol=1e-4)
    # Rows that the copy engine cannot read go to decode, with the same plan.
    odd = torch.nn.functional.pad(q, (1, 0))[..., 1:]
    out = plait.flash_attention(odd, k, v, causal=True)
    torch.testing.assert_close(out, plait.flash_attention(q, k, v, causal=True), rtol=1e-2, atol=4e-3)


@HOPPER
def test_what_hoppers_copy_engine_cannot_read_is_refused_by_name_before_anything_runs():
    q, k, v = (torch.randn(1, 2, 300, 65).bfloat16()[..., 1:] for _ in "qkv")  # rows not 16-byte aligned
    aligned = torch.randn(1, 2, 300, 64).bfloat16()
    named = {"backend": "cuda_sm90"}
    for name, tensors in (("q", (q, aligned, aligned)), ("k", (aligned, k, aligned)), ("v", (aligned, aligned, v))):
        with pytest.raises(
            RuntimeError,
            match=rf"^{name}: cuda_sm90 cannot read it.* way out: use backend auto, or a contiguous copy of {name}",
        ):
            plait.flash_attention(*tensors, **named)
        plait.flash_attention(*tensors)
        plait.flash_attention(*(x.contiguous() for x in tensors), **named)
    before = v.clone()
    step = {"k_new": aligned[:, :, :9], "v_new": aligned[:, :, :9], "cache_seqlens": torch.tensor([20]).int()}
    with pytest.raises(RuntimeError, match="^v_cache: cuda_sm90 cannot read it"):
        plait.attention_with_kvcache(aligned[:, :, :9], aligned.clone(), v, **step, **named)
    assert torch.equal(v, before)


@HALF
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "Hq, Hk, Sk", [(32, 8, 1000), (32, 8, 9000), (28, 4, 5000), (9, 3, 5000), (16, 2, 20000), (16, 1, 40000)]
)
def test_few_heads_share_their_keys_over_one_or_several_clusters(Hq, Hk, Sk, D, dtype):
    q = torch.randn(1, Hq, 1, D).to(dtype)
    k, v = (torch.randn(1, Hk, Sk, D).to(dtype) for _ in "kv")
    wide_k, wide_v = (x.double().repeat_interleave(Hq // Hk, 1) for x in (k, v))
    expected = torch.softmax(q.double() @ wide_k.transpose(2, 3) / math.sqrt(D), -1) @ wide_v
    out = plait.flash_attention(q, k, v)
    bar = 2.6e-3 if dtype == torch.bfloat16 else 3.25e-4
    assert (out.double() - expected).norm() < bar * expected.norm()
    if Hk <= 2 and D == 128 and torch.cuda.get_device_capability() == (9, 0):
        assert re.search(r"shared by [48] cluster\(s\)", plait.explain(q, k, v))
    for _ in range(3):
        assert torch.equal(out, plait.flash_attention(q, k, v))


@HALF
def test_auto_takes_tensor_cores_for_caches(dtype):
    call = make(D=64, Dv=64, dtype=dtype, causal=True, Sn=0)
    assert torch.equal(call.run(), call.run(backend="cuda_mma", strategy="split_kv"))


@HALF
def test_a_sequence_does_not_depend_on_its_batch(dtype):
    CPU["check_alone_and_together"](
        make(D=64, Dv=64, lengths=(300, 5, 170), capacity=310, Sq=1, Sn=0, causal=True, dtype=dtype)
    )
    for Sq in (2, 130):
        q, k, v = (torch.randn(3, H, S, 128).to(dtype) for H, S in ((8, Sq), (2, 500), (2, 500)))
        together = plait.flash_attention(q, k, v, split_size=64)
        alone = [plait.flash_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], split_size=64) for i in range(3)]
        assert torch.equal(together, torch.cat(alone))
    # Keys that sequences share by a stride of zero, which the copy engine does not read.
    shared = [x[:1].expand(3, -1, -1, -1) for x in (k, v)]
    together = plait.flash_attention(q, *shared, split_size=64)
    assert torch.equal(together[:1], plait.flash_attention(q[:1], k[:1], v[:1], split_size=64))


@HALF
@pytest.mark.parametrize("page", [0, 16])
def test_lengths_grow_in_a_graph(page, dtype):
    """One captured step appends, turns and attends; every replay finds the length one higher."""
    S, count, D = 96, 40, 64
    q, k, v = (torch.randn(2, H, count, D).to(dtype) for H in (8, 2, 2))
    shape = (2 * S // page, page, 2, D) if page else (2, 2, S, D)
    table = torch.randperm(2 * S // page).view(2, -1).int() if page else None
    caches = [torch.full(shape, math.nan, dtype=dtype) for _ in range(2)]
    lengths, now = torch.zeros(2, dtype=torch.int32), [x[:, :, :1].clone() for x in (q, k, v)]

    def step():
        out = plait.attention_with_kvcache(now[0], *caches, k_new=now[1], v_new=now[2], cache_seqlens=lengths,
                                           block_table=table, causal=True, backend="cuda_mma")  # fmt: skip
        lengths.add_(1)
        return out

    outs = decoded_in_a_graph(step, now, (q, k, v), lengths)
    expected = plait.flash_attention(q, k, v, causal=True, backend="cuda_naive")
    torch.testing.assert_close(outs, expected, rtol=4 * torch.finfo(dtype).eps, atol=2e-3)
