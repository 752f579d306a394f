"""How kernels are timed: bursts in ABBA order, sustained runs, CUDA graphs for short calls, rotating inputs.

Called by bench.kernels. The reasons stand in bench/README.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from plait.bench.timing import Stats, synchronize

_REPEAT_BELOW_MS = 20.0  # a first estimate of longer calls is good enough


@dataclass(frozen=True)
class Protocol:
    """How long what is run. Milliseconds and seconds are of the device's time."""

    sample_ms: float = 4.0  # one sample of a burst: as many launches as fill it
    samples: int = 10  # of each contender; an even number, as the order turns around each time
    slow_ms: float = 500.0  # a contender whose samples take longer gets fewer of them, at least 3
    warm_ms: float = 100.0  # load before the first sample of a case
    graph_below_ms: float = 0.3  # shorter calls are launched by a CUDA graph of `graph_launches`
    graph_launches: int = 20
    sustained_s: float = 1.0  # back-to-back launches, of which the last quarter counts
    rest_s: float = 0.3  # before each sustained run
    chunk_ms: float = 10.0  # what one sample of a sustained run covers


class Contender:
    """One function of a comparison: `call(i)` runs it on input set `i < ring`.

    work: what one call does, in FLOP or bytes. sustained: whether it also joins sustained runs.
    """

    def __init__(self, call: Callable[[int], object], work: float, ring: int = 1, sustained: bool = True):
        self.call, self.work, self.ring, self.sustained = call, work, ring, sustained
        self.calls = 1  # of one run
        self.call_ms = 0.0  # estimated
        self._turn = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def run_ms(self) -> float:
        """Estimated time of one run."""
        return self.call_ms * self.calls

    def prepare(self, device: torch.device, protocol: Protocol) -> None:
        """Calls it for the first time, estimates its time and records a CUDA graph where launching would show."""
        self._call_next()
        synchronize(device)
        self.call_ms = _timed(self._call_next, device)
        if self.call_ms < _REPEAT_BELOW_MS:
            self.call_ms = min(_timed(self._call_next, device) for _ in range(3))
        if device.type == "cuda" and self.call_ms < protocol.graph_below_ms:
            self._record(device, protocol)

    def runs(self, wanted_ms: float) -> int:
        """How many runs fill `wanted_ms`."""
        return max(math.ceil(wanted_ms / self.run_ms), 1)

    def run(self, times: int) -> None:
        run = self._call_next if self._graph is None else self._graph.replay
        for _ in range(times):
            run()

    def _call_next(self) -> None:
        self.call(self._turn)
        self._turn = (self._turn + 1) % self.ring

    def _record(self, device: torch.device, protocol: Protocol) -> None:
        """A graph of many calls, on the current stream, which must not be the default one. What cannot be captured
        stays as it is."""
        graph = torch.cuda.CUDAGraph()
        calls = self.ring * math.ceil(protocol.graph_launches / self.ring)
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
                for _ in range(calls):
                    self._call_next()
        except RuntimeError:
            synchronize(device)
            return
        graph.replay()
        self._graph, self.calls = graph, calls
        self.call_ms = min(_timed(graph.replay, device) for _ in range(3)) / calls


class _Spans:
    """Spans of device time, read together after the work is done."""

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[tuple] = []

    def __len__(self) -> int:
        return len(self._marks)

    def measure(self, function: Callable[[], None]) -> None:
        start = self._mark()
        function()
        self._marks.append((start, self._mark()))

    def _mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[float]:
        """Milliseconds of each span so far, in order."""
        synchronize(self.device)
        if self.device.type == "cuda":
            return [start.elapsed_time(end) for start, end in self._marks]
        return [(end - start) * 1e3 for start, end in self._marks]


def _timed(function: Callable[[], None], device: torch.device) -> float:
    spans = _Spans(device)
    spans.measure(function)
    return max(spans.read()[0], 1e-4)


def burst(
    contenders: dict[str, Contender], device: torch.device, protocol: Protocol, deadline: float
) -> dict[str, Stats]:
    """ms per call: interleaved samples of a few ms, in the order A B .. B A, after a warm-up. All prepared before.

    A round is queued as a whole behind one untimed launch, so that no sample sees an empty queue. After `deadline`
    (time.monotonic) a contender gets no more than its first 3 samples.
    """
    names = list(contenders)
    runs = {name: c.runs(protocol.sample_ms) for name, c in contenders.items()}
    wanted = {
        name: min(max(int(protocol.slow_ms / (runs[name] * c.run_ms)), 3), protocol.samples)
        for name, c in contenders.items()
    }
    lead = min(names, key=lambda name: contenders[name].run_ms)
    contenders[lead].run(contenders[lead].runs(protocol.warm_ms))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(max(wanted.values())):
        if turn >= 3 and time.monotonic() > deadline:
            break
        order = [name for name in (names if turn % 2 == 0 else names[::-1]) if len(samples[name]) < wanted[name]]
        contenders[lead].run(1)
        spans = _Spans(device)
        for name in order:
            spans.measure(lambda name=name: contenders[name].run(runs[name]))
        for name, ms in zip(order, spans.read(), strict=True):
            samples[name].append(ms / (runs[name] * contenders[name].calls))
    return {name: Stats(tuple(values)) for name, values in samples.items()}


def sustained(
    contenders: dict[str, Contender], device: torch.device, protocol: Protocol, deadline: float
) -> dict[str, Stats]:
    """ms per call of the last quarter of a second of back-to-back launches, each contender after a rest of its own.

    Contenders that would start after `deadline` are left out.
    """
    results = {}
    for name, contender in contenders.items():
        if time.monotonic() + protocol.rest_s + protocol.sustained_s > deadline:
            continue
        time.sleep(protocol.rest_s)
        runs = contender.runs(protocol.chunk_ms)
        chunks = max(math.ceil(protocol.sustained_s * 1e3 / (runs * contender.run_ms)), 1)
        spans = _Spans(device)
        for _ in range(chunks):
            if spans and time.monotonic() > deadline:
                break
            spans.measure(lambda c=contender, n=runs: c.run(n))
        times = spans.read()
        results[name] = Stats(tuple(ms / (runs * contender.calls) for ms in last_quarter(times)))
    return results


def last_quarter(times: list[float]) -> list[float]:
    """The spans that lie in the last quarter of their sum, at least the last one."""
    left, kept = sum(times) / 4, []
    for ms in reversed(times):
        if kept and ms > left:
            break
        kept.append(ms)
        left -= ms
    return kept[::-1]
