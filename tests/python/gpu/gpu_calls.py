"""Tensors and training steps for both CUDA backends. Called by test_gpu_results.py and test_gpu_streams.py."""

import pytest
import torch

HALF = [torch.bfloat16, torch.float16]
_BACKENDS = [("cuda_naive", torch.float32), ("cuda_naive", torch.bfloat16), ("cuda_mma", torch.bfloat16),
            ("cuda_mma", torch.float16)]  # fmt: skip
EACH_BACKEND = pytest.mark.parametrize("backend, dtype", _BACKENDS, ids=lambda x: str(x).removeprefix("torch."))


def make(B=2, Hq=4, Hk=2, Sq=130, Sk=150, D=64, dtype=torch.bfloat16):
    return [torch.randn(B, H, S, D).to(dtype) for H, S in ((Hq, Sq), (Hk, Sk), (Hk, Sk))]


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def train(call, tensors, dout):
    """out and the gradients of `tensors`."""
    inputs = leaves(tensors)
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]
