"""The device that a benchmark runs on, and whether a model fits it.

Called by bench.__main__.
"""

from __future__ import annotations

import os

import torch

import plait
from plait.bench.config import LOSS_CHUNK, BenchError, Config

_COPIES = 4  # of the parameters: weights, gradients, two moments


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


def parameters(config: Config) -> int:
    """Weights of the model without IHA's mixing weights, which are few."""
    block = 2 * config.hidden * (config.heads + config.kv_heads) * config.head_dim
    block += 3 * config.hidden * config.intermediate
    return config.layers * block + 2 * config.vocab * config.hidden


def training_bytes(config: Config) -> int:
    """About what a train step with gradient checkpointing holds at its peak.

    Weights, gradients and two moments; the input of every layer; of one layer the MLP (activations and gradients,
    6 x intermediate), the rest (12 x hidden) and, for IHA, pseudo-heads, their gradients and a workspace (8 x P
    x hidden); the logits of a chunk, in fp32 with their gradients.
    """
    size = getattr(torch, config.dtype).itemsize
    tokens = config.B * config.N
    pseudo = 8 * config.P if config.chosen_layers else 0
    layer = 6 * config.intermediate + (12 + pseudo) * config.hidden
    kept = config.layers * config.hidden
    loss = min(tokens, LOSS_CHUNK) * config.vocab * (2 * size + 3 * 4)
    return _COPIES * parameters(config) * size + tokens * (kept + layer) * size + loss


def check_memory(config: Config, device: torch.device) -> None:
    """Refuses a model that cannot be trained in the device's memory, before it is built."""
    needed = training_bytes(config)
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise BenchError(
            f"--preset: {parameters(config) / 1e9:.1f}e9 parameters in {config.dtype} need about "
            f"{needed / 2**30:.0f} GiB to train on {config.B} x {config.N} tokens, {device} has "
            f"{available / 2**30:.0f} GiB; take --preset tiny, a smaller --N, or smaller --hidden and --layers"
        )
