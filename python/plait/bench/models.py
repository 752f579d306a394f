"""The three models of the main job, from one config and one seed, and the device they run on.

Called by bench.llama and bench.sweep.
"""

from __future__ import annotations

import inspect
import os

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

import plait
from plait.bench.config import BenchError, Config
from plait.integrations.transformers import convert_to_iha, register

KINDS = ("sdpa", "plait", "iha")
LABELS = {"sdpa": "SDPA", "plait": "plait", "iha": "IHA"}

# transformers renamed the argument and the output field of the key-value cache.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

_COPIES = 5  # of the parameters: weights, gradients, two moments, one spare for activations


def pick_device(name: str, dtype: torch.dtype) -> torch.device:
    """The device to run on: `auto` takes a GPU where this build of plait can serve it, else the CPU."""
    if name == "auto":
        served = torch.cuda.is_available() and refusal("cuda", dtype) is None
        return torch.device("cuda" if served else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BenchError(f"--device: got {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise BenchError(f"--device: got {name!r}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"--device: got {name!r}, but torch {torch.__version__} sees no CUDA device; use --device cpu")
    reason = refusal(device, dtype)
    if reason is not None:
        raise BenchError(f"--device: this build of plait cannot serve {name!r}: {reason}")
    return device


def refusal(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why plait cannot run attention on a device, or None where it can."""
    try:
        x = torch.zeros(1, 1, 8, 64, dtype=dtype, device=device)
        plait.flash_attention(x, x, x, causal=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


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


def check_memory(config: Config, device: torch.device) -> None:
    """Refuses a model whose weights and optimizer cannot fit, before it is built."""
    block = 2 * config.hidden * (config.heads + config.kv_heads) * config.head_dim
    block += 3 * config.hidden * config.intermediate
    parameters = config.layers * block + 2 * config.vocab * config.hidden
    needed = _COPIES * parameters * getattr(torch, config.dtype).itemsize
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise BenchError(
            f"--preset: {parameters / 1e9:.1f}e9 parameters in {config.dtype} need about {needed / 2**30:.0f} GiB to "
            f"train, {device} has {available / 2**30:.0f} GiB; take --preset tiny or smaller --hidden and --layers"
        )


def enable_checkpointing(model: LlamaForCausalLM) -> None:
    """Gradient checkpointing in every decoder layer, under either of its two names."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
