"""Turns half of a small LLaMA's attention layers into Interleaved Head Attention and trains it on Python sources.

Run by hand: `python examples/python/train_llama_iha.py` (needs transformers >= 5); half a minute on two free cores. It
shows how, and compares nothing: `python -m plait.bench llama` trains the same model with plain attention beside it.
"""

import argparse
from pathlib import Path

import torch
from plait.integrations.transformers import convert_to_iha, register
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH = 128, 8


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # any bytes will do

    register()  # attn_implementation="plait" exists from here on
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.1,
        attn_implementation="plait",
    )
    model = LlamaForCausalLM(config)
    ids = text[:LENGTH][None]
    before = model(ids).logits
    convert_to_iha(model, layers=[1, 3], P=4)
    print(f"largest change of a logit by the conversion: {(model(ids).logits - before).abs().max():.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(61):
        starts = torch.randint(0, len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2d}  loss {loss.item():.3f} nats per byte")

    w_q = model.model.layers[1].self_attn.w_q  # [heads, P, heads]
    print(f"pseudo-heads of layer 1 now differ by up to {(w_q[:, 0] - w_q[:, 1]).abs().max():.3f}")
    prompt = torch.tensor([list(b"def main(")])
    generated = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
    print(bytes(generated[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
