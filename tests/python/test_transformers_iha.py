"""convert_to_iha: exact start in joint mode, P slices that part in training, caches, padded and packed rows, refusals.

Run by pytest (make test).
"""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pt = pytest.importorskip("plait.integrations.transformers")

VOCAB = 61
TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]


@pytest.fixture(autouse=True)
def one_thread():
    """Small work: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(family="Llama", implementation="sdpa", **changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if family == "Mistral":
        settings["sliding_window"] = None
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes}, attn_implementation=implementation)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(10)
    return model


def converted(model, layers=(0, 2), P=2, **options):
    return pt.convert_to_iha(copy.deepcopy(model), layers, P, **options)


def checkpoint(model):
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def tokens(batch=2, length=29):
    return torch.randint(
        2, VOCAB, (batch, length), generator=torch.Generator(torch.get_default_device()).manual_seed(5)
    )


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("P", [1, 2, 4])
def test_joint_without_window_starts_at_the_models_logits(family, P):
    model = model_of(family)
    iha = converted(model, "all", P)
    assert all(isinstance(layer.self_attn, pt.IhaSelfAttention) for layer in iha.model.layers)
    for inputs in ({}, {"use_cache": False}):
        torch.testing.assert_close(logits(iha, tokens(), **inputs), logits(model, tokens(), **inputs), **TOLERANCE)


def test_only_the_named_layers_change_and_names_stay():
    model = model_of()
    iha = converted(model, [1, 3], 2)
    assert [type(layer.self_attn).__name__ for layer in iha.model.layers] == [
        "LlamaAttention", "IhaSelfAttention", "LlamaAttention", "IhaSelfAttention"]  # fmt: skip
    added = set(iha.state_dict()) - set(model.state_dict())
    assert added == {f"model.layers.{i}.self_attn.{w}" for i in (1, 3) for w in ("w_q", "w_k", "w_v")}
    assert set(model.state_dict()) <= set(iha.state_dict())
    assert iha.config._attn_implementation == "plait"
    again = converted(model, [1, 3], 2, seed=9)
    again.load_state_dict(iha.state_dict())
    torch.testing.assert_close(logits(again, tokens()), logits(iha, tokens()), atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_the_p_slices_differ_after_ten_steps(mode):
    iha = converted(model_of(), [0, 2], 4, mode=mode, noise=0.01).train()
    checkpoint(iha)
    optimizer = torch.optim.AdamW(iha.parameters(), lr=1e-3)
    before = iha.model.layers[0].self_attn.w_q.detach().clone()
    ids, losses = tokens(4, 32), []
    for _ in range(10):
        loss = iha(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    attention = iha.model.layers[0].self_attn
    assert torch.equal(before[:, 0], before[:, 3])
    for weight in (attention.w_q, attention.w_k, attention.w_v):
        gaps = (weight[:, :, None] - weight[:, None]).abs().amax((0, 3))
        assert gaps[~torch.eye(4, dtype=torch.bool)].min() > 1e-5
    if mode == "interleaved":
        assert (attention.r[:, 0] - attention.r[:, 1]).abs().max() > 1e-6


def padded(side, batch=2, length=29):
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, slice(None, 11) if side == "left" else slice(18, None)] = 0
    return mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_the_model(side):
    model, mask = model_of(), padded(side)
    for P in (1, 2):
        iha = converted(model, "all", P)
        got, want = (logits(m, tokens(), attention_mask=mask)[mask.bool()] for m in (iha, model))
        torch.testing.assert_close(got, want, **TOLERANCE)


def spread(iha):
    """Makes the pseudo-heads of every converted layer differ strongly."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    with torch.no_grad():
        for layer in iha.model.layers:
            for name in ("w_q", "w_k", "w_v", "r"):
                weight = getattr(layer.self_attn, name, None)
                if weight is not None:
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.5)
    return iha


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"mode": "interleaved"}, {"mode": "interleaved", "rope_index": "token", "window": 9}],
)
def test_padded_packed_and_cached_calls_equal_plain_ones(options):
    """Trained-like weights: each sequence gives the same logits alone, padded, packed, and step by step."""
    iha = spread(converted(model_of(), [0, 1, 3], 2, **options))
    ids = tokens()
    first, second = logits(iha, ids[:1], use_cache=False), logits(iha, ids[1:, :18], use_cache=False)
    left, mask = ids.clone(), padded("left")
    left[1, 11:] = ids[1, :18]
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    got = logits(iha, left, attention_mask=mask, position_ids=position_ids)
    torch.testing.assert_close(got[:1], first, **TOLERANCE)
    torch.testing.assert_close(got[1:, 11:], second, **TOLERANCE)
    right = logits(iha, ids, attention_mask=padded("right"), use_cache=False)
    torch.testing.assert_close(right[1:, :18], second, **TOLERANCE)
    packed_positions = torch.cat([torch.arange(29), torch.arange(18)])[None]
    packed = logits(iha, torch.cat([ids[:1], ids[1:, :18]], 1), position_ids=packed_positions, use_cache=False)
    torch.testing.assert_close(packed, torch.cat([first, second], 1), **TOLERANCE)
    steps, cache = [], {}
    for part in ids[:1].split([20, 1, 1, 7], dim=1):
        with torch.no_grad():
            out = iha(part, use_cache=True, **cache)
        steps.append(out.logits)
        name = "cache" if "cache" in out else "past_key_values"
        cache = {name: out[name]}
    torch.testing.assert_close(torch.cat(steps, 1), first, **TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_equals_the_model(cache):
    model = model_of()
    iha = converted(model, [0, 2], 4)
    mask = padded("left")
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(iha.generate(tokens(), **options), model.generate(tokens(), **options))


def test_generate_equals_recomputing_with_a_window():
    iha = spread(converted(model_of(), [0, 2], 2, window=5))
    ids = tokens(1, 9)
    want = ids
    for _ in range(6):
        want = torch.cat([want, logits(iha, want, use_cache=False)[:, -1:].argmax(-1)], 1)
    assert torch.equal(iha.generate(ids, max_new_tokens=6, do_sample=False), want)


def test_window_limits_what_a_token_sees():
    iha = converted(model_of(num_hidden_layers=1), [0], 2, window=3)
    ids = tokens(1, 20)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 7) % VOCAB
    moved = (logits(iha, ids) - logits(iha, changed)).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_sliding_window_of_the_model_is_kept():
    model = model_of("Mistral", sliding_window=6)
    iha = converted(model, "all", 2)
    for inputs in ({}, {"attention_mask": padded("left")}):
        real = inputs.get("attention_mask", torch.ones(2, 29)).bool()
        got, want = logits(iha, tokens(), **inputs)[real], logits(model, tokens(), **inputs)[real]
        torch.testing.assert_close(got, want, **TOLERANCE)
    with pytest.raises(ValueError, match="sliding window of 6"):
        converted(model, [0], 2, mode="interleaved")


def test_interleaved_with_one_pseudo_head_is_the_model():
    model = model_of()
    for rope_index in ("row", "token"):
        iha = converted(model, "all", 1, mode="interleaved", rope_index=rope_index)
        torch.testing.assert_close(logits(iha, tokens()), logits(model, tokens()), **TOLERANCE)


def test_interleaved_turned_by_token_starts_at_the_models_logits():
    model = model_of()
    iha = converted(model, "all", 3, mode="interleaved", rope_index="token")
    torch.testing.assert_close(logits(iha, tokens()), logits(model, tokens()), **TOLERANCE)
    by_row = converted(model, "all", 3, mode="interleaved")
    assert (logits(by_row, tokens()) - logits(model, tokens())).abs().max() > 1e-2


def test_example_runs_as_printed():
    example = Path(__file__).parents[2] / "examples" / "python" / "train_llama_iha.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert float(lines[0].split(": ")[1]) < 1e-4
    losses = [float(line.split()[3]) for line in lines if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 2
    assert lines[-1].startswith("def main(")


def test_half_precision_model_keeps_wide_mixing_weights():
    iha = converted(model_of().to(torch.bfloat16), [1], 2)
    assert iha.model.layers[1].self_attn.w_v.dtype == torch.float32
    assert logits(iha, tokens()).isfinite().all()


@pytest.mark.parametrize("arguments, message", [
    ({"layers": [4]}, "layers: got 4, the model has layers 0 to 3"),
    ({"layers": [-1]}, "layers: got -1"),
    ({"layers": "even"}, "layers: got 'even'"),
    ({"P": 0}, "P: got 0"),
    ({"P": 2.0}, "P: got 2.0"),
    ({"mode": "mixed"}, "mode: got 'mixed'"),
    ({"window": -2}, "window: got -2"),
    ({"mode": "interleaved", "rope_index": "position"}, "rope_index: got 'position'")])  # fmt: skip
def test_bad_arguments_are_refused_and_change_nothing(arguments, message):
    model = model_of()
    with pytest.raises(ValueError, match=message):
        pt.convert_to_iha(model, **{"layers": [0], "P": 2, **arguments})
    assert model.config._attn_implementation == "sdpa"
    assert all(type(layer.self_attn).__name__ == "LlamaAttention" for layer in model.model.layers)


def test_other_models_and_second_conversion_are_refused():
    iha = converted(model_of(), [0], 2)
    with pytest.raises(ValueError, match="layer 0 is converted already"):
        pt.convert_to_iha(iha, [0], 2)
    with pytest.raises(ValueError, match="no decoder layers"):
        pt.convert_to_iha(torch.nn.Linear(2, 2), [0], 2)
    gemma = transformers.GemmaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16)  # fmt: skip
    with pytest.raises(ValueError, match="GemmaAttention"):
        pt.convert_to_iha(transformers.GemmaForCausalLM(gemma), [0], 2)
    iha.train()
    iha.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match=r"dropout: got 0\.5"):
        iha(tokens(), use_cache=False)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([0, "a"], {}, "layers: got 'a'"),
        (0, {}, "layers: got 0, expected 'all' or layer indices"),
        (True, {}, "layers: got True"),
        ([True], {}, "layers: got True"),
        ([[0]], {}, r"layers: got \[0\]"),
        (None, {}, "layers: got None"),
        ([0], {"noise": math.nan}, "noise: got nan"),
        ([0], {"seed": "x"}, "seed: got 'x'"),
    ],
)
def test_what_is_no_layer_is_refused_by_name(layers, options, message):
    with pytest.raises(ValueError, match=message):
        converted(model_of(), layers, **options)
