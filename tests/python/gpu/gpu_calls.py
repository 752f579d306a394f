"""Tensors and training steps for both CUDA backends. Called by the tests beside it."""

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


def captured(call):
    """A graph of `call`, warmed up on a side stream as torch asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def decoded_in_a_graph(step, now, whole, lengths):
    """The outputs of all steps, from one captured `step` over the tensors `now`. They take one position of `whole`
    after the other; `lengths` count up from 0 on the device."""
    graph, out = captured(step)
    lengths.zero_()
    outs = []
    for i in range(whole[0].shape[2]):
        for to, tensor in zip(now, whole, strict=True):
            to.copy_(tensor[:, :, i : i + 1])
        graph.replay()
        outs.append(out.clone())
    return torch.cat(outs, 2)
