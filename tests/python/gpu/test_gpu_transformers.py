"""tests/python/test_transformers.py on the GPU: whole models; and decoding in half precision. Called by pytest."""

import pytest
import torch
from gpu_calls import captured
from on_gpu import suite

transformers = pytest.importorskip("transformers")

CPU = suite(
    "test_transformers", skip={"test_unknown_mask_functions_are_evaluated": "it asks transformers for a CPU mask"}
)
globals().update(CPU)


def half_pair():
    return [model.to(torch.float16) for model in CPU["pair"](num_attention_heads=8, head_dim=32)]


@torch.no_grad()
def test_a_step_over_a_static_cache_in_a_graph():
    """One captured step of the whole model, replayed: SDPA's tokens, on tensor cores."""
    sdpa, ours = half_pair()
    ids = CPU["tokens"](2, 9)
    greedy = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    want = sdpa.generate(ids, attention_mask=torch.ones_like(ids), **greedy)[:, 9:]
    cache = transformers.StaticCache(config=ours.config, max_cache_len=40)
    token = ours(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    got, position = torch.zeros_like(want), torch.zeros(1, dtype=torch.long)

    def note():
        got.index_copy_(1, position, token)
        position.add_(1)

    def step():
        token.copy_(ours(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))
        note()

    note()
    graph, _ = captured(step)  # takes two steps before
    for _ in range(9):
        graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_in_half_precision_gives_sdpas_tokens(cache, side):
    sdpa, ours = half_pair()
    ids = CPU["tokens"](3, 11)
    mask = torch.ones_like(ids) if side is None else CPU["padding"]("left", 3, 11, (0, 4, 9))
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    want, got = (m.generate(ids, **options) for m in (sdpa, ours))
    assert torch.equal(got, want)
