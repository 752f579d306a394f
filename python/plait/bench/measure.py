"""What is measured of one model: prefill, decode, a full train step, and the parts of a single layer.

Called by bench.llama and bench.sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from plait.bench import timing
from plait.bench.config import Config
from plait.bench.models import CACHE_NAME, enable_checkpointing


@dataclass(frozen=True)
class Measured:
    """Times of one model in ms: the prompt, one decoded token of a whole batch, one optimizer step."""

    prefill: timing.Stats
    decode: timing.Stats
    step: timing.Stats
    layer: dict[str, float]  # premix, attention, rest: forward and backward of one layer


def measure_model(model, config: Config, batches: Iterator[torch.Tensor], layer: int, device: torch.device) -> Measured:
    """Runs prefill, decode, one layer and `n_iter` train steps. The model is trained a little by it.

    batches: an endless iterator of `[B, N]` token batches, fetched inside the timed step.
    """
    ids = next(batches).to(device)
    model.eval()
    prefill = timing.sample(lambda: _prefill(model, ids), device, config.n_iter)
    decode = _decode(model, ids, config.n_iter, device)
    model.train()
    parts = layer_parts(model, config, layer, device)
    enable_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr * 1e-2)
    step = timing.sample(lambda: train_step(model, optimizer, next(batches), device), device, config.n_iter)
    return Measured(prefill, decode, step, parts)


@torch.no_grad()
def _prefill(model, ids: torch.Tensor):
    return model(ids, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def _decode(model, ids: torch.Tensor, count: int, device: torch.device) -> timing.Stats:
    """Samples of single-token steps after a prompt; the cache grows by one token each."""
    state = {"out": _prefill(model, ids)}

    def step() -> None:
        token = state["out"].logits[:, -1:].argmax(-1)
        state["out"] = model(token, use_cache=True, **{CACHE_NAME: state["out"][CACHE_NAME]})

    return timing.sample(step, device, count)


def train_step(model, optimizer: torch.optim.Optimizer, batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Forward, backward and update on one batch `[B, N]` from the DataLoader; returns the loss, on the device."""
    ids = batch.to(device, non_blocking=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def layer_parts(model, config: Config, index: int, device: torch.device) -> dict[str, float]:
    """ms that one decoder layer spends in premix, attention and the rest, forward and backward together.

    Without checkpointing; `rest` (norms, projections, MLP, rotary embedding) is what the two do not explain of an
    undisturbed call.
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

    total = timing.sample(run, device, config.n_iter).median
    groups = {
        "premix": lambda name: name.startswith("plait::") and ("premix" in name or "collapse" in name),
        "attention": lambda name: name.startswith("plait::attention") or "scaled_dot_product" in name,
    }
    parts = timing.op_times(run, device, groups, config.n_iter)
    return {**parts, "rest": max(total - sum(parts.values()), 0.0), "total": total}
