"""Text for training: bytes of the Python standard library's sources, or of a file, with a held-out part.

Called by bench.llama.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from plait.bench.config import BenchError

_HELD_OUT_EVERY = 10  # one source file in ten, or the last tenth of a single file, is never trained on
_HELD_OUT_TOKENS = 16384  # read for each held-out loss, at most


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts, as bytes `[length]` uint8."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    def unigram_entropy(self) -> float:
        """Entropy of single held-out bytes in nats: what a model that ignores context can reach at best."""
        counts = torch.bincount(self.held_out.long(), minlength=256).double()
        share = counts[counts > 0] / counts.sum()
        return float(-(share * share.log()).sum())


def load_corpus(text: str | None, length: int) -> Corpus:
    """The corpus of `--text`, or the standard library's when None. `length`: bytes of one training sequence."""
    if text is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        held_out = b"".join(f.read_bytes() for f in files[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY])
        train = b"".join(f.read_bytes() for i, f in enumerate(files) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2)
        source = f"{len(files)} source files of {folder}"
    else:
        try:
            content = Path(text).read_bytes()
        except OSError as error:
            raise BenchError(f"--text: cannot read {text}: {error.strerror or error}") from error
        cut = len(content) - len(content) // _HELD_OUT_EVERY
        train, held_out, source = content[:cut], content[cut:], text
    if min(len(train), len(held_out)) < length + 1:
        raise BenchError(
            f"--text: {source} gives {len(train)} bytes to train on and {len(held_out)} held out; sequences of "
            f"N = {length} need more of both. Take a longer text or a smaller --N"
        )
    parts = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    return Corpus(*parts, source)


class Windows(Dataset):
    """Sequences of `length` tokens from one text, starting at given places."""

    def __init__(self, text: torch.Tensor, starts: torch.Tensor, length: int):
        self.text, self.starts, self.length = text, starts, length

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:  # [length] int64
        start = int(self.starts[index])
        return self.text[start : start + self.length].long()


def training_batches(corpus: Corpus, length: int, batch: int, steps: int, seed: int, pin: bool) -> DataLoader:
    """`steps` batches `[batch, length]` of random places in the training text; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(corpus.train) - length, (steps * batch,), generator=generator)
    return DataLoader(Windows(corpus.train, starts, length), batch_size=batch, pin_memory=pin)


def held_out_batches(corpus: Corpus, length: int, batch: int) -> list[torch.Tensor]:
    """Batches `[<= batch, length]` of evenly spread, disjoint held-out sequences; always the same."""
    count = max(min(_HELD_OUT_TOKENS, len(corpus.held_out)) // length, 1)
    stride = (len(corpus.held_out) - length) / max(count - 1, 1)
    windows = Windows(corpus.held_out, torch.tensor([int(i * stride) for i in range(count)]), length)
    return list(DataLoader(windows, batch_size=batch))
