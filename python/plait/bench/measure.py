"""What is measured of one model: prefill, decode, a full train step, and the parts of a single layer.

Called by bench.llama and bench.sweep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plait.bench import timing
from plait.bench.config import Config
from plait.bench.models import CACHE_NAME, causal_loss, enable_checkpointing, make_optimizer

_WARM_TOKENS = 2048  # of the sequences that warm a train step up: optimizer states, kernels
_PREFILL_SHARE, _DECODE_SHARE = 0.2, 0.25  # of a model's time has passed when they end
_LAYER_CALLS = 3


@dataclass(frozen=True)
class Measured:
    """Times of one model in ms: the prompt, one decoded token of a whole batch, one optimizer step."""

    prefill: timing.Stats
    decode: timing.Stats
    step: timing.Stats
    layer: dict[str, float]  # premix, attention, rest, total: forward and backward of one layer
    peak_gib: float | None  # of GPU memory, in the train step


def measure_model(
    model,
    config: Config,
    batches: Iterator[torch.Tensor],
    layer: int,
    device: torch.device,
    seconds: float = math.inf,
) -> Measured:
    """Runs prefill, decode, one layer and train steps, `n_iter` of each or what `seconds` allow, at least one.

    The model is trained a little by it. batches: an endless iterator of `[B, N]` token batches, fetched inside the
    timed step.
    """
    start = time.monotonic()
    ids = next(batches).to(device)
    model.eval()
    prefill = timing.sample(lambda: _prefill(model, ids), device, config.n_iter, until=start + _PREFILL_SHARE * seconds)
    decode = _decode(model, ids, config.n_iter, device, start + _DECODE_SHARE * seconds)
    model.train()
    parts = layer_parts(model, config, layer, device)
    enable_checkpointing(model)
    optimizer = make_optimizer(model, config.lr * 1e-2, device)
    train_step(model, optimizer, ids[:, :_WARM_TOKENS], device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = timing.sample(
        lambda: train_step(model, optimizer, next(batches), device), device, config.n_iter, warmup=0,
        until=start + seconds,
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return Measured(prefill, decode, step, parts, peak)


@torch.no_grad()
def _prefill(model, ids: torch.Tensor):
    return model(ids, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def _decode(model, ids: torch.Tensor, count: int, device: torch.device, until: float) -> timing.Stats:
    """Samples of single-token steps after a prompt; the cache grows by one token each."""
    state = {"out": _prefill(model, ids)}

    def step() -> None:
        token = state["out"].logits[:, -1:].argmax(-1)
        state["out"] = model(token, use_cache=True, **{CACHE_NAME: state["out"][CACHE_NAME]})

    return timing.sample(step, device, count, until=until)


def train_step(model, optimizer: torch.optim.Optimizer, batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Forward, backward and update on one batch `[B, N]` from the DataLoader; returns the loss, on the device."""
    ids = batch.to(device, non_blocking=True)
    loss = causal_loss(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def layer_parts(model, config: Config, index: int, device: torch.device) -> dict[str, float]:
    """ms that one decoder layer spends in premix, attention and the rest, forward and backward together.

    Without checkpointing; `rest` (norms, projections, MLP, rotary embedding) is what the two do not explain of the
    same call.
    """
    layer = model.model.layers[index]
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator(device).manual_seed(config.seed)
    shape = (config.B, config.N, config.hidden)
    hidden = torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()
    position_ids = torch.arange(config.N, device=device)[None]
    with torch.no_grad():
        rotary = model.model.rotary_emb(hidden, position_ids)

    def run() -> None:
        out = layer(hidden, attention_mask=None, position_ids=position_ids, position_embeddings=rotary, use_cache=False)
        out.backward(hidden.detach())
        hidden.grad = None
        layer.zero_grad(set_to_none=True)

    groups = {
        "premix": lambda name: name.startswith("plait::") and ("premix" in name or "collapse" in name),
        "attention": lambda name: name.startswith("plait::attention") or "scaled_dot_product" in name,
    }
    times = timing.op_times(run, device, groups, min(config.n_iter, _LAYER_CALLS))
    return times | {"rest": times["total"] - times["premix"] - times["attention"]}
