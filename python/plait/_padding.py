"""The one warning of plait: head dims for which there are no tensor-core kernels, and the padding that avoids it.

Called by _options.py after each call on real tensors, and by _fake.py while torch.compile traces one.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_DEVICE = "cuda"
_MULTIPLE = 8  # of the head dims of cuda_mma, up to the 1024 of every backend
_warned = False


def warn_of_padding(q: Tensor, v: Tensor, backend: str, stacklevel: int = 2) -> None:
    """Warns once per process where backend "auto" leaves the tensor cores of a GPU unused because of a head dim."""
    global _warned
    if _warned or backend != "auto" or q.device.type != _DEVICE or q.dtype not in (torch.float16, torch.bfloat16):
        return
    dims = q.shape[-1], v.shape[-1]
    if not all(isinstance(dim, int) for dim in dims) or all(_served(dim) for dim in dims):
        return
    if q.dtype == torch.bfloat16 and torch.cuda.is_available() and torch.cuda.get_device_capability(q.device)[0] < 8:
        return  # no padding helps: such a GPU has tensor cores for float16 only
    _warned = True
    warnings.warn(f"plait: {_text(*dims)}", stacklevel=stacklevel + 1)


def _served(dim: int) -> bool:
    return dim % _MULTIPLE == 0


def _text(D: int, Dv: int) -> str:
    slow = f"head dim {D}" if D == Dv else f"head dims {D} of q and k and {Dv} of v"
    slow += " has no tensor-core kernel" if D == Dv else " have no tensor-core kernel"
    steps = []
    if not _served(D):
        steps.append(f"pad q and k with zeros to {_padded(D)} and pass scale={D} ** -0.5")
    if not _served(Dv):
        steps.append(f"pad v with zeros to {_padded(Dv)} and cut the output to {Dv}")
    return (
        f"{slow} (multiples of {_MULTIPLE} have), so the slow backend cuda_naive serves this call. To avoid it, "
        f"{'; '.join(steps)} (torch.nn.functional.pad)"
    )


def _padded(dim: int) -> int:
    return -(-dim // _MULTIPLE) * _MULTIPLE
