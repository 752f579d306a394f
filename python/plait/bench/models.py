"""The three models of the main job, from one config and one seed.

Called by bench.llama and bench.sweep.
"""

from __future__ import annotations

import contextlib
import inspect

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

from plait.bench.config import LOSS_CHUNK, Config
from plait.bench.contenders import SDPA
from plait.integrations.transformers import convert_to_iha, register

KINDS = ("sdpa", "plait", "iha")
LABELS = {"sdpa": "SDPA", "plait": "plait", "iha": "IHA"}

# transformers renamed the argument and the output field of the key-value cache.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def llama_config(config: Config) -> LlamaConfig:
    """The transformers config that all three models share."""
    return LlamaConfig(
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        num_hidden_layers=config.layers,
        intermediate_size=config.intermediate,
        vocab_size=config.vocab,
        max_position_embeddings=2 * config.N + config.n_iter,
        initializer_range=config.hidden**-0.5,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def build(config: Config, kind: str, device: torch.device) -> LlamaForCausalLM:
    """One of the models, made on its device: `sdpa`, `plait`, or `iha` (plait with IHA in the chosen layers)."""
    transformers_logging.set_verbosity_error()
    register()
    torch.manual_seed(config.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            llama_config(config),
            dtype=getattr(torch, config.dtype),
            attn_implementation="sdpa" if kind == "sdpa" else "plait",
        )
    if kind == "iha":
        convert_to_iha(model, config.chosen_layers, config.P, config.mode, config.window, seed=config.seed)
    return model


def enable_checkpointing(model: LlamaForCausalLM) -> None:
    """Gradient checkpointing in every decoder layer, under either of its two names."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def causal_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of predicting each token of ids `[B, N]` but the first, in fp32.

    Long batches go through the vocabulary in chunks that are computed again in the backward: the logits of 65536
    tokens and their gradients would fill tens of GiB.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    chunks = list(zip(hidden.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True))
    if len(chunks) == 1:
        return _loss_sum(model.lm_head, hidden, targets) / len(targets)
    sums = [checkpoint(_loss_sum, model.lm_head, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum() / len(targets)


def _loss_sum(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(head(hidden).float(), targets, reduction="sum")


def sdpa_backend(config: Config, device: torch.device) -> str:
    """The backend of torch's SDPA that the model named so runs on: cudnn where it serves the layers, else fa2.

    `sdpa`, torch's own choice, on the CPU and where neither does.
    """
    if device.type != "cuda":
        return "sdpa"
    shape = (config.B, config.heads, config.N, config.head_dim)
    x = torch.randn(shape, dtype=getattr(torch, config.dtype), device=device, requires_grad=True)
    for name in ("cudnn", "fa2"):
        try:
            with sdpa_kernel(SDPA[name]):
                torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
        except RuntimeError:
            continue
        return name
    return "sdpa"


def sdpa_preferring(name: str):
    """Lets SDPA take `name` (of `sdpa_backend`) wherever it can, other kernels where it cannot."""
    if name not in SDPA:
        return contextlib.nullcontext()
    first = SDPA[name]
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([first, *(backend for backend in rest if backend != first)], set_priority=True)


def make_optimizer(model: LlamaForCausalLM, rate: float, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on a GPU, where its update is one pass over the parameters."""
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
