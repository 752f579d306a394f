"""generate() of converted models over an IhaCache, both kinds: the tokens and logits of computing everything anew."""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")
pt = pytest.importorskip("plait.integrations.transformers")

VOCAB = 61
TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}
pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = pytest.mark.parametrize("kind", ["mixed", "raw"])


def iha_model(family="Llama", layers="all", P=3, window=None, dtype=torch.float32, **changes):
    """A random converted model whose pseudo-heads differ strongly."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
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
    config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(10)
    return spread(pt.convert_to_iha(model.to(dtype), layers, P, window=window))


@torch.no_grad()
def spread(model):
    for layer in model.model.layers:
        for name in ("w_q", "w_k", "w_v"):
            weight = getattr(layer.self_attn, name, None)
            if weight is not None:
                weight.add_(torch.randn(weight.shape) * 0.4)
    return model


def tokens(batch=3, length=13):
    return torch.randint(
        2, VOCAB, (batch, length), generator=torch.Generator(torch.get_default_device()).manual_seed(5)
    )


def left_padding(batch=3, length=13, pads=(0, 4, 9)):
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return mask


def name_of_cache(model):
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def generate(model, ids, cache=None, **options):
    given = {} if cache is None else {name_of_cache(model): cache}
    return model.generate(ids, max_new_tokens=10, do_sample=False, **given, **options)


MODELS = {
    "all layers": {},
    "two of three": {"layers": [0, 2]},
    "not the first": {"layers": [1, 2], "P": 2},
    "window": {"window": 5},
    "Qwen3": {"family": "Qwen3", "P": 2},
    "sliding window of the model": {"family": "Mistral", "sliding_window": 6, "layers": [0, 2]},
}


@KINDS
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_of_the_dynamic_cache(case, kind, padded):
    model = iha_model(**MODELS[case])
    options = {"attention_mask": left_padding() if padded else torch.ones(3, 13, dtype=torch.long)}
    cache = pt.IhaCache(model, 40, kind)
    got = generate(model, tokens(), cache, **options)
    assert got.shape == (3, 23) and torch.equal(got, generate(model, tokens(), **options))
    assert cache.get_seq_length() == 22


def step(model, ids, cache, **inputs):
    with torch.no_grad():
        return model(ids, use_cache=True, **{name_of_cache(model): cache}, **inputs).logits


@KINDS
def test_logits_step_by_step(kind):
    model, ids = iha_model(window=7), tokens(2, 29)
    cache = pt.IhaCache(model, 29, kind)
    pointers, got = None, []
    for part in ids.split([11, 1, 1, 9, 7], dim=1):
        got.append(step(model, part, cache))
        now = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        assert pointers in (None, now), "the cache stays where it is"
        pointers = now
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(got, 1), model(ids, use_cache=False).logits, **TOLERANCE)
    assert cache.layers[0].keys.shape == ((2, 2, 29, 3, 16) if kind == "mixed" else (2, 2, 29, 16))


@KINDS
def test_padded_rows_are_rows_alone(kind):
    model, ids, mask = iha_model(), tokens(3, 21), left_padding(3, 21, (0, 4, 14))
    cache, got, begin = pt.IhaCache(model, 32, kind), [], 0
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    for count in (9, 8, 1, 3):  # the last row's first token is in the second part
        end = begin + count
        got.append(step(model, ids[:, begin:end], cache, attention_mask=mask[:, :end],
                        position_ids=position_ids[:, begin:end]))  # fmt: skip
        begin = end
    got = torch.cat(got, 1)
    assert got.isfinite().all()
    for row, pads in enumerate((0, 4, 14)):
        with torch.no_grad():
            want = model(ids[row : row + 1, pads:], use_cache=False).logits
        torch.testing.assert_close(got[row : row + 1, pads:], want, **TOLERANCE)


@KINDS
def test_beams_and_speculation(kind):
    model = iha_model()
    for options, ids in (
        ({"num_beams": 3, "attention_mask": left_padding()}, tokens()),
        ({"num_beams": 2, "num_return_sequences": 2}, tokens(1)),
        ({"prompt_lookup_num_tokens": 3}, tokens(1).repeat(1, 2)),
    ):
        got = generate(model, ids, pt.IhaCache(model, 64, kind), **options)
        assert torch.equal(got, generate(model, ids, **options))


@KINDS
def test_cropped_and_used_again(kind):
    model, ids = iha_model(), tokens(2, 20)
    cache = pt.IhaCache(model, 20, kind)
    first = step(model, ids, cache)
    cache.crop(-8)
    assert cache.get_seq_length() == 12 and cache.get_max_length() == 20
    torch.testing.assert_close(step(model, ids[:, 12:], cache), first[:, 12:], **TOLERANCE)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    cache.crop(-1)
    torch.testing.assert_close(step(model, ids[1:, 19:].repeat(2, 1), cache), first[1:, 19:].repeat(2, 1, 1),
                               **TOLERANCE)  # fmt: skip
    cache.reset()
    torch.testing.assert_close(step(model, ids, cache), first, **TOLERANCE)


@KINDS
def test_half_precision(kind):
    model = iha_model(dtype=torch.bfloat16)
    cache = pt.IhaCache(model, 40, kind)
    ids = tokens(2, 17)
    got = torch.cat([step(model, part, cache) for part in ids.split([15, 1, 1], dim=1)], 1)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    with torch.no_grad():
        want, exact = model(ids, use_cache=False).logits, model.float()(ids, use_cache=False).logits
    assert (got - exact).square().mean() <= 2 * (want - exact).square().mean()


def test_interleaved_layers_keep_their_own_cache():
    model = iha_model(layers=[0])
    pt.convert_to_iha(model, [2], 2, mode="interleaved")
    cache = pt.IhaCache(model, 40)
    assert [type(layer).__name__ for layer in cache.layers] == ["IhaCacheLayer", "DynamicLayer", "DynamicLayer"]
    assert torch.equal(generate(model, tokens(), cache), generate(model, tokens()))


def test_refusals():
    model = iha_model()
    for arguments, message in (
        ((model, 20, "both"), "kind: got 'both'"),
        ((model, 0), "max_cache_len: got 0"),
        ((model, 2.0), "max_cache_len: got 2.0"),
        ((transformers.LlamaForCausalLM(model.config), 20), "model: has no IHA layers"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            pt.IhaCache(*arguments)
    with pytest.raises(ValueError, match="max_cache_len: the cache holds 12 tokens and would get 13"):
        generate(model, tokens(), pt.IhaCache(model, 12))
    right = left_padding().flip(-1)
    with pytest.raises(ValueError, match="attention_mask: .*left-padded rows only"):
        step(model, tokens(), pt.IhaCache(model, 40), attention_mask=right)
    two_sequences = torch.block_diag(torch.ones(6, 6), torch.ones(7, 7)).tril().bool()[None, None]
    for mask in (two_sequences, torch.ones(1, 1, 13, 13).bool()):  # the other is not causal
        with pytest.raises(ValueError, match="attention_mask: .*(left-padded|not causal)"):
            step(model, tokens(1), pt.IhaCache(model, 40), attention_mask=mask)
    with pytest.raises(ValueError, match="requires gradients.*no_grad"):
        model(tokens(), use_cache=True, **{name_of_cache(model): pt.IhaCache(model, 40)})
    other = iha_model(layers=[0])
    with pytest.raises(RuntimeError, match="cache: an IhaCache was made for another model"):
        step(other, tokens(), pt.IhaCache(model, 40))
    cache = pt.IhaCache(model, 40)
    with pytest.raises(ValueError, match="tokens_to_remove: got 3"):
        cache.crop(3)


@pytest.mark.parametrize("kind", ["mixed", "raw"])
def test_generate_under_autocast(kind):
    model = iha_model()
    with torch.autocast(tokens().device.type, dtype=torch.bfloat16):
        got = generate(model, tokens(), pt.IhaCache(model, 64, kind))
    assert got.shape == (3, 23)
    assert torch.equal(got[:, :14], generate(model, tokens())[:, :14])
