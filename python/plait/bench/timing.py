"""Timers of the benchmarks: samples of calls, interleaved samples, and what plait's ops take inside a call.

Called by bench.measure, bench.cpu, bench.protocol and bench.kernels.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Stats:
    """Samples of one call, in ms unless said otherwise."""

    samples: tuple[float, ...]

    def quantile(self, share: float) -> float:
        ordered = sorted(self.samples)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def map(self, function: Callable[[float], float]) -> Stats:
        """The statistics of a value computed from each sample (a rate from a time)."""
        return Stats(tuple(function(sample) for sample in self.samples))


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives memory of dropped tensors and models back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_call(function: Callable[[], object], device: torch.device) -> float:
    """One call's wall time in ms, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def sample(
    function: Callable[[], object], device: torch.device, count: int, warmup: int = 1, until: float = math.inf
) -> Stats:
    """`count` samples of one function after `warmup` calls; fewer, but one at least, where another of the last
    duration would end after `until` (time.monotonic)."""
    for _ in range(warmup):
        function()
    samples: list[float] = []
    while len(samples) < count and (not samples or time.monotonic() + samples[-1] / 1e3 < until):
        samples.append(time_call(function, device))
    return Stats(tuple(samples))


def sample_interleaved(
    functions: dict[str, Callable[[], object]], device: torch.device, count: int, warmup: int = 1
) -> dict[str, Stats]:
    """`count` samples of each function, taken in turns, so that a slow moment of the machine meets all of them."""
    for function in functions.values():
        for _ in range(warmup):
            function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(count):
        for name, function in functions.items():
            samples[name].append(time_call(function, device))
    return {name: Stats(tuple(values)) for name, values in samples.items()}


class OpTimer(TorchDispatchMode):
    """Adds up, per group, the time of ops while it is active, forward and backward.

    groups: name -> predicate on the op's name ("plait::premix_forward"). On a GPU the time between two events around
    the op, read when `milliseconds` is called.
    """

    def __init__(self, groups: dict[str, Callable[[str], bool]], device: torch.device):
        super().__init__()
        self.groups, self.device = groups, device
        self._spans: dict[str, list[tuple]] = {name: [] for name in groups}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        group = next((group for group, wanted in self.groups.items() if wanted(name)), None)
        if group is None:
            return func(*args, **(kwargs or {}))
        start = self._mark()
        result = func(*args, **(kwargs or {}))
        self._spans[group].append((start, self._mark()))
        return result

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def milliseconds(self) -> dict[str, float]:
        """Time per group since the timer was made."""
        synchronize(self.device)
        if self.device.type == "cuda":
            return {name: sum(a.elapsed_time(b) for a, b in spans) for name, spans in self._spans.items()}
        return {name: sum(b - a for a, b in spans) * 1e3 for name, spans in self._spans.items()}


def op_times(
    function: Callable[[], object], device: torch.device, groups: dict[str, Callable[[str], bool]], count: int
) -> dict[str, float]:
    """Milliseconds that the ops of each group take in one call, and of the whole call as `total`: those of the call
    with the median total among `count`, after one to warm up."""
    calls = []
    for _ in range(count + 1):
        with OpTimer(groups, device) as timer:
            total = time_call(function, device)
        calls.append({**timer.milliseconds(), "total": total})
    return sorted(calls[1:], key=lambda call: call["total"])[count // 2]
