"""Trains one model on the corpus and follows its loss on held-out text.

Called by bench.llama.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from plait.bench import data
from plait.bench.config import Config
from plait.bench.measure import train_step
from plait.bench.models import causal_loss, enable_checkpointing, make_optimizer

_EVALUATIONS = 8
_WARMUP_SHARE = 0.1
_FINAL_RATE_SHARE = 0.1


@dataclass(frozen=True)
class Curve:
    """Held-out losses in nats per byte after so many steps."""

    steps: list[int]
    losses: list[float]


def train(
    model, config: Config, corpus: data.Corpus, device: torch.device, advance: Callable[[int, float], None]
) -> Curve:
    """`train_steps` AdamW steps with warmup and cosine decay; every model sees the same batches in the same order.

    advance(step, held_out_loss) is called after each step, with the latest held-out loss.
    """
    torch.manual_seed(config.seed)
    model.train()
    enable_checkpointing(model)
    optimizer = make_optimizer(model, config.lr, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, config.train_steps))
    held_out = data.held_out_batches(corpus, config.N, config.B)
    pin = device.type == "cuda"
    batches = data.training_batches(corpus, config.N, config.B, config.train_steps, config.seed, pin)
    every = max(config.train_steps // _EVALUATIONS, 1)
    curve = Curve([0], [held_out_loss(model, held_out, device)])
    for step, batch in enumerate(batches, start=1):
        train_step(model, optimizer, batch, device)
        schedule.step()
        if step % every == 0 or step == config.train_steps:
            curve.steps.append(step)
            curve.losses.append(held_out_loss(model, held_out, device))
        advance(step, curve.losses[-1])
    return curve


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate at a step: linear warmup, then a cosine down to a tenth."""
    warmup = max(int(steps * _WARMUP_SHARE), 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return _FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def held_out_loss(model, batches: list[torch.Tensor], device: torch.device) -> float:
    """Mean loss per predicted byte, in nats; every batch weighs by its tokens."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches:
        ids = batch.to(device)
        predicted = batch.shape[0] * (batch.shape[1] - 1)
        total += causal_loss(model, ids).item() * predicted
        count += predicted
    model.train()
    return total / count
