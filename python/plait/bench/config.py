"""Settings of the llama and sweep benchmarks: presets, checks, and the layers and windows that follow from them.

Called by bench.llama, bench.sweep and bench.models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import plait

LOSS_CHUNK = 4096  # tokens whose logits exist at a time


class BenchError(Exception):
    """A setting that cannot run; the command line prints it and exits with status 2."""


@dataclass(frozen=True)
class Config:
    """One LLaMA and how it is measured. Sizes are counts; `wsl` is the IHA window's keys to the left, -1 = none."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    intermediate: int
    vocab: int
    P: int
    B: int
    N: int
    iha_frac: float
    dtype: str
    lr: float
    train_steps: int
    n_iter: int
    wsl: str | int = "auto"  # "auto" (FLOP-matched), "none" or keys to the left
    iha_layers: str = "even"  # "even", "first" or layer indices, comma-separated
    mode: str = "joint"
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def window(self) -> int:
        """Keys to the left that an IHA layer sees: resolved from `wsl`."""
        if self.wsl == "none":
            return -1
        if self.wsl == "auto":
            return plait.flop_matched_window(self.N, self.P, mode=self.mode)[0]
        return int(self.wsl)

    @property
    def chosen_layers(self) -> list[int]:
        """Indices of the layers that become IHA."""
        if self.iha_layers not in ("even", "first"):
            return sorted({int(part) for part in self.iha_layers.split(",")})
        count = round(self.iha_frac * self.layers)
        if self.iha_layers == "first":
            return list(range(count))
        return [int((index + 0.5) * self.layers / count) for index in range(count)]

    @property
    def fraction(self) -> float:
        """The share of layers that are IHA, after rounding."""
        return len(self.chosen_layers) / self.layers

    def as_dict(self) -> dict:
        return asdict(self)


PRESETS = {
    "tiny": Config(
        hidden=128, heads=4, kv_heads=4, layers=4, intermediate=352, vocab=256, P=4, B=4, N=256, iha_frac=0.5,
        dtype="float32", lr=4e-3, train_steps=200, n_iter=5,
    ),
    "2.4b": Config(
        hidden=2560, heads=20, kv_heads=20, layers=28, intermediate=6912, vocab=32000, P=4, B=1, N=8192,
        iha_frac=0.5, dtype="bfloat16", lr=2e-4, train_steps=0, n_iter=6,
    ),
}  # fmt: skip
FRACTIONS = {"tiny": [0.5], "2.4b": [0.5, 0.8]}  # of IHA layers, that the llama benchmark compares by default


def build_config(preset: str, overrides: dict) -> Config:
    """The preset with every override that is not None, checked. A changed `heads` carries `kv_heads` along, a
    changed `hidden` keeps the preset's ratio to `intermediate`."""
    if preset not in PRESETS:
        raise BenchError(f"--preset: got {preset!r}, known presets: {', '.join(PRESETS)}")
    base = PRESETS[preset]
    known = {field.name for field in fields(Config)}
    changes = {name: value for name, value in overrides.items() if name in known and value is not None}
    if "heads" in changes:
        changes.setdefault("kv_heads", changes["heads"])
    if "hidden" in changes:
        changes.setdefault("intermediate", max(round(changes["hidden"] * base.intermediate / base.hidden / 16), 1) * 16)
    config = replace(base, **changes)
    check(config)
    return config


def check(config: Config) -> None:
    """Raises BenchError for the first setting that cannot run."""
    for name in ("hidden", "heads", "kv_heads", "layers", "intermediate", "P", "B", "N", "n_iter"):
        if getattr(config, name) < 1:
            raise BenchError(f"{_option(name)}: got {getattr(config, name)}, expected at least 1")
    if config.train_steps < 0:
        raise BenchError(f"--train-steps: got {config.train_steps}, expected 0 (no training) or more")
    if not 0.0 <= config.iha_frac <= 1.0:
        raise BenchError(f"--iha-frac: got {config.iha_frac}, expected a share of the layers, 0 to 1")
    if config.lr <= 0.0:
        raise BenchError(f"--lr: got {config.lr}, expected a positive number")
    if config.heads % config.kv_heads:
        raise BenchError(f"--heads: got {config.heads}, expected a multiple of --kv-heads {config.kv_heads}")
    if config.hidden % (2 * config.heads):
        raise BenchError(f"--hidden: got {config.hidden}, expected a multiple of 2 x --heads = {2 * config.heads}")
    if config.mode not in ("joint", "interleaved"):
        raise BenchError(f"--mode: got {config.mode!r}, expected joint or interleaved")
    if config.vocab < 256:
        raise BenchError(f"--vocab: got {config.vocab}, expected at least 256: the text is read as bytes")
    if config.N < 2:
        raise BenchError(f"--N: got {config.N}, expected at least 2: the first token only starts the prediction")
    _check_window(config)
    _check_layers(config)


def _check_window(config: Config) -> None:
    if config.wsl == "auto" and config.P > 1 and 2 * config.P > config.N:
        raise BenchError(
            f"--N: got {config.N}, a FLOP-matched window for P {config.P} needs at least 2 x P = {2 * config.P}; "
            "take a longer N, a smaller P, or set --wsl"
        )
    if config.wsl in ("auto", "none"):
        return
    try:
        valid = int(config.wsl) >= -1
    except ValueError:
        valid = False
    if not valid:
        raise BenchError(f"--wsl: got {config.wsl!r}, expected auto, none, or the number of keys to the left")


def _check_layers(config: Config) -> None:
    if config.iha_layers in ("even", "first"):
        return
    try:
        bad = [index for index in config.chosen_layers if not 0 <= index < config.layers]
    except ValueError:
        raise BenchError(
            f"--iha-layers: got {config.iha_layers!r}, expected even, first, or indices such as 0,3,6"
        ) from None
    if bad:
        raise BenchError(f"--iha-layers: got {bad[0]}, the model has layers 0 to {config.layers - 1}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def prepare_folder(path: str, option: str = "--out") -> Path:
    """Creates the output folder and proves that it can be written, before any long work."""
    folder = Path(path)
    probe = folder / ".write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchError(f"{option}: cannot write to {folder}: {error.strerror or error}") from error
    return folder
