"""Results that only a GPU shows: torch SDPA, max-abs bars, refusals, autocast, compilation. Called by pytest."""

import oracle
import plait
import pytest
import test_ops
import torch
from gpu_calls import EACH_BACKEND, HALF, make, train
from torch.library import opcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def wide(tensors):
    return [t.double() for t in tensors]


def sdpa(**options):
    """SDPA's math path."""

    def call(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return call


@EACH_BACKEND
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_agrees_with_sdpa_in_float64(backend, dtype, causal, D):
    tensors = make(Sq=300, Sk=300, D=D, dtype=dtype)
    dout = torch.randn(2, 4, 300, D).to(dtype)
    expected = train(sdpa(is_causal=causal), wide(tensors), dout)
    got = train(lambda *t: plait.flash_attention(*t, causal=causal, backend=backend), tensors, dout)
    names = ["out", "dq", "dk", "dv"]
    for name, mine, exact in zip(names, got, expected, strict=True):
        oracle.assert_close(
            mine, exact, dtype, gradient=name in ("dq", "dk") or (name == "dv" and dtype == torch.float32)
        )


def eager(q, k, v):
    """Attention that rounds scores, probabilities and products to the dtype."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("gain", [1.0, 4.0])
@pytest.mark.parametrize("D", [32, 64, 96, 128, 192, 256])
def test_largest_error_is_at_most_twice_eagers(dtype, gain, D):
    q, k, v = make(Sq=256, Sk=256, D=D, dtype=dtype)
    tensors, dout = [q * gain, k, v], torch.randn(2, 4, 256, D).to(dtype)
    exact = train(sdpa(), wide(tensors), dout)
    loose = train(eager, tensors, dout)
    got = train(plait.flash_attention, tensors, dout)
    for name, mine, theirs, expected in zip("out dq dk dv".split(), got, loose, exact, strict=True):
        rounding = (expected.to(dtype).double() - expected).abs().max()
        bar = 2 * (theirs.double() - expected).abs().max() + rounding
        error = (mine.double() - expected).abs().max()
        assert error <= bar, f"{name}: max error {error:.2e} above {bar:.2e}"


@EACH_BACKEND
def test_both_devices_give_the_same(backend, dtype):
    tensors = make(dtype=dtype)
    got = plait.flash_attention(*tensors, causal=True, backend=backend).cpu()
    with torch.device("cpu"):
        expected = plait.flash_attention(*(x.cpu() for x in tensors), causal=True)
    # fp32 sums of another order; of 16 bits, both round P and the output: two units in the last place of 2
    rounding = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(got, expected, rtol=rounding, atol=rounding)


# What runs.


def test_explain_names_the_backend():
    q, k, v = make()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert ("cuda_sm90" if hopper else "cuda_mma") in plait.explain(q, k, v, causal=True)
    assert "cuda_mma" in plait.explain(q, k, v, causal=True, backward=True)
    assert "cuda_naive" in plait.explain(*(x.float() for x in (q, k, v)))
    assert "cuda_naive" in plait.explain(*(x[..., :63] for x in (q, k, v)))


@pytest.mark.parametrize("options, message", [
    ({"backend": "cpu"}, "^backend: .*cuda"),
    ({"backend": "reference"}, "^backend: .*cuda"),
    ({"backend": "cuda_naive", "strategy": "split_kv"}, "split_kv"),
    ({"backend": "cuda_naive", "split_size": 64}, "split_size"),
], ids=str)  # fmt: skip
def test_what_the_gpu_does_not_serve_is_refused_by_name(options, message):
    with pytest.raises(RuntimeError, match=message):
        plait.flash_attention(*make(), **options)


def test_mixed_devices_are_refused():
    q, k, v = make()
    with pytest.raises(ValueError, match="^k: .*cpu"):
        plait.flash_attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="^cu_seqlens_q: .*cpu"):
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        cu = torch.tensor([0, 9], dtype=torch.int32, device="cpu")
        plait.flash_attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu)


def half_options(mode):
    return test_ops.attention_options(mode=mode, layout="bhsd", out_dtype=None)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("mode", ["plain", "joint", "interleaved"])
def test_opcheck_on_tensor_cores(mode, dtype):
    """test_gpu_ops.py has head dims that only cuda_naive takes."""
    pseudo = () if mode == "plain" else (2,)
    shapes = (2, 4, 9, *pseudo, 16), (2, 2, 12, *pseudo, 16), (2, 2, 12, *pseudo, 16)
    tensors = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    rest = (torch.randn(4), None, None, *half_options(mode=mode))
    opcheck(torch.ops.plait.attention_forward.default, (*tensors, *rest))
    tensors = [x.detach() for x in tensors]
    out, lse = torch.ops.plait.attention_forward(*tensors, *rest)
    opcheck(torch.ops.plait.attention_backward.default, (out, out, lse, lse, *tensors, *rest))
    x, w = torch.randn(2, 4, 9, 16).to(dtype), torch.randn(4, 2, 4)
    arguments = (x, w, *oracle.rope_tables(9, 8), None, None, "half", "token", 0, "bhsd", "auto")
    opcheck(torch.ops.plait.premix_forward.default, arguments)
    opcheck(torch.ops.plait.premix_backward.default, (torch.ops.plait.premix_forward(*arguments), *arguments))


# Autocast, compilation.


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_casts_q_k_and_v_together(dtype):
    q, k, v = make(dtype=torch.float32)
    k = k.to(dtype)
    leaf = q.clone().requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        out = plait.flash_attention(leaf, k, v, causal=True)
        mixed = plait.premix(q, torch.eye(4)[:, None])
    assert out.dtype == mixed.dtype == dtype
    assert torch.equal(out, plait.flash_attention(q.to(dtype), k, v.to(dtype), causal=True))
    out.sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_autocast_of_a_cache_step():
    caches = [torch.zeros(2, 2, 40, 64, dtype=torch.bfloat16) for _ in range(2)]
    q, k, v = make(Sq=3, Sk=3, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = plait.attention_with_kvcache(q, *caches, k_new=k, v_new=v, cache_seqlens=5, causal=True)
    assert out.dtype == torch.bfloat16 and torch.equal(caches[0][:, :, 5:8], k.bfloat16())


@pytest.mark.names_its_device  # with a default device, dynamo cannot trace Tensor.unflatten
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_agrees(mode):
    """reduce-overhead captures the whole step in CUDA graphs."""
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    module = plait.nn.InterleavedHeadAttention(256, 4, 2, 64, P=2, window=(40, 0), **made)
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    for _ in range(4):
        x = torch.randn(2, 90, 256, **made)
        results = []
        for call in (module, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            module.zero_grad()
            out = call(x)
            out.float().square().sum().backward()
            results.append([out.detach().clone(), *(p.grad.clone() for p in module.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(a.abs().max()))


# Training.


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_a_module_trains_as_on_the_cpu(mode):
    with torch.device("cpu"):
        torch.manual_seed(3)
        host = plait.nn.InterleavedHeadAttention(48, 4, 2, 16, P=2, mode=mode)
        x, target = torch.randn(2, 30, 48), torch.randn(2, 30, 48)
    device = plait.nn.InterleavedHeadAttention(48, 4, 2, 16, P=2, mode=mode)
    device.load_state_dict(host.state_dict())
    losses = []
    for module, where in ((host, "cpu"), (device, "cuda")):
        with torch.device(where):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            mine = []
            for _ in range(8):
                optimizer.zero_grad()
                loss = (module(x.to(where)) - target.to(where)).square().mean()
                loss.backward()
                optimizer.step()
                mine.append(float(loss))
            losses.append(mine)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
