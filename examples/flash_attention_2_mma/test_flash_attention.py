"""Every strategy against torch's scaled_dot_product_attention and against plait's float64 oracle, fp16 [B, H, S, D].

Called by pytest: python -m pytest examples/flash_attention_2_mma, and with the project's own tests.
"""

import pytest
import torch
import torch.nn.functional as F
from plait import explain, flash_attention

STRATEGIES = ["auto", "split_q", "split_kv"]
# B, query heads, key heads, Sq, Sk, D
SHAPES = {
    "prefill": (2, 4, 4, 256, 256, 64),
    "odd sizes": (1, 4, 4, 129, 129, 80),
    "grouped heads": (1, 8, 2, 200, 200, 128),
    "chunk after a prefix": (1, 4, 2, 33, 700, 64),
    "decoding": (3, 8, 2, 1, 1025, 128),
    "large head dim": (1, 2, 2, 70, 70, 512),
}
# Relative root-mean-square errors that half precision may show (docs/numerics.md).
BARS = {"out": 3.25e-4, "dq": 4.75e-4, "dk": 4.75e-4, "dv": 3.25e-4}


def inputs(shape, seed=0):
    B, Hq, Hk, Sq, Sk, D = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(B, Hq, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, D), (B, Hq, Sq, D)]
    return [torch.randn(size, generator=generator).half() for size in sizes]  # q, k, v, dout


def torch_attention(q, k, v, causal):
    """torch's attention with plait's alignment of causal masks: the last query sees the last key."""
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)


def run(attention, q, k, v, dout, dtype):
    """out and the gradients of one attention function on inputs of `dtype`."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return dict(
        zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype))), strict=True)
    )


def relative_error(got, expected):
    difference = got.double() - expected.double()
    return (difference.square().mean() / expected.double().square().mean()).sqrt().item()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_strategy_matches_torch_and_the_oracle(shape, causal):
    tensors = inputs(shape)
    expected = {
        "torch": run(lambda q, k, v: torch_attention(q, k, v, causal), *tensors, torch.float64),
        "oracle": run(
            lambda q, k, v: flash_attention(q, k, v, causal=causal, backend="reference"), *tensors, torch.float64
        ),
    }
    for strategy in STRATEGIES:
        got = run(
            lambda q, k, v, strategy=strategy: flash_attention(q, k, v, causal=causal, strategy=strategy),
            *tensors,
            torch.float16,
        )
        assert {x.dtype for x in got.values()} == {torch.float16}
        for source, results in expected.items():
            for name, bar in BARS.items():
                error = relative_error(got[name], results[name])
                assert error <= bar, f"{strategy}: {name} differs from {source} by {error:.2e}, allowed {bar:.2e}"


def test_torch_and_the_oracle_agree():
    q, k, v, dout = inputs(SHAPES["chunk after a prefix"])
    ours = run(lambda q, k, v: flash_attention(q, k, v, causal=True, backend="reference"), q, k, v, dout, torch.float64)
    theirs = run(lambda q, k, v: torch_attention(q, k, v, True), q, k, v, dout, torch.float64)
    for name in BARS:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-12, rtol=1e-10)


def test_a_strategy_that_is_asked_for_is_the_one_that_runs():
    q, k, v, _ = inputs(SHAPES["chunk after a prefix"])
    for strategy in STRATEGIES[1:]:
        assert f"strategy   {strategy}\n" in explain(q, k, v, causal=True, strategy=strategy)


def test_auto_splits_keys_when_rows_are_few():
    q, k, v, _ = inputs(SHAPES["decoding"])
    assert "strategy   split_kv\n" in explain(q, k, v)
    q, k, v, _ = inputs((4, 8, 8, 512, 512, 64))
    assert "strategy   split_q\n" in explain(q, k, v)


def test_split_d_is_refused_with_reasons_on_the_cpu():
    q, k, v, _ = inputs(SHAPES["large head dim"])
    with pytest.raises(RuntimeError) as refusal:
        flash_attention(q, k, v, strategy="split_d")
    text = str(refusal.value)
    for part in (
        "strategy: ",
        "required: ",
        "head dim 512",
        "supported by cpu: ",
        "missing: strategy split_d",
        "way out",
    ):
        assert part in text
