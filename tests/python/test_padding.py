"""The one-time warning of head dims without tensor-core kernels. No GPU needed: the CPU stands for one."""

import warnings

import plait
import pytest
import torch
from plait import _fake, _padding
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def first_call(monkeypatch):
    monkeypatch.setattr(_padding, "_warned", False)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(_padding, "_DEVICE", "cpu")


def qkv(D=12, Dv=None, dtype=torch.float16, **kind):
    return [torch.ones(1, 2, 5, d, dtype=dtype, **kind) for d in (D, D, Dv or D)]


def warned(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if str(w.message).startswith("plait: ")]


def attend(*tensors, **options):
    return lambda: plait.flash_attention(*tensors, **options)


def test_once_and_with_the_padding_that_avoids_it(on_cpu):
    (text,) = warned(attend(*qkv()))
    for part in ("head dim 12 has no", "q and k with zeros to 16 and pass scale=12 ** -0.5", "v with zeros to 16"):
        assert part in text
    assert "cut the output to 12" in text and "cuda_naive" in text
    assert warned(attend(*qkv())) == []


def test_the_padding_that_it_names_changes_nothing():
    q, k, v = (torch.randn(1, 2, 5, 12) for _ in range(3))
    wide = (torch.nn.functional.pad(x, (0, 4)) for x in (q, k, v))
    padded = plait.flash_attention(*wide, scale=12**-0.5)[..., :12]
    torch.testing.assert_close(padded, plait.flash_attention(q, k, v))


@pytest.mark.parametrize(
    ("dims", "part", "other"),
    [((64, 20), "pad v with zeros to 24 and cut the output to 20", "pad q"), ((20, 64), "pad q and k", "pad v"),
     ((508, 512), "pad q and k with zeros to 512", "pad v"), ((64, 300), "64 of q and k and 300 of v", "pad q")],
)  # fmt: skip
def test_it_names_only_what_helps(on_cpu, dims, part, other):
    (text,) = warned(attend(*qkv(*dims)))
    assert part in text and other not in text


@pytest.mark.parametrize(
    "call",
    [
        attend(*qkv(64)),
        attend(*qkv(256)),
        attend(*qkv(512)),
        attend(*qkv(dtype=torch.float32)),
        attend(*qkv(), backend="cpu"),
    ],
    ids=["64", "256", "512", "float32", "backend"],
)
def test_silent_where_there_is_nothing_to_say(on_cpu, call):
    assert warned(call) == []


def test_silent_on_the_cpu():
    assert warned(attend(*qkv())) == []


def test_silent_where_a_call_is_refused(on_cpu):
    def call():
        with pytest.raises(ValueError):
            plait.flash_attention(*qkv(), softcap=-1.0)

    assert warned(call) == []


def test_packed_and_iha_calls_warn_too(on_cpu, monkeypatch):
    cu = torch.tensor([0, 5], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in qkv()]
    calls = [
        lambda: plait.flash_attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu),
        lambda: plait.iha_attention(*qkv(), *(torch.ones(2, 3, 2) for _ in range(3))),
    ]
    for call in calls:
        assert len(warned(call)) == 1
        monkeypatch.setattr(_padding, "_warned", False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_warn_while_they_are_traced(on_cpu, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(plait.flash_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = warned(lambda: torch.testing.assert_close(compiled(*qkv()), plait.flash_attention(*qkv())))
    assert len(found) == 1


def test_fake_cuda_tensors_warn(monkeypatch):
    monkeypatch.setattr(_fake, "_check", lambda *arguments: None)
    with FakeTensorMode():
        assert len(warned(attend(*qkv(device="cuda")))) == 1


@pytest.mark.parametrize(("capability", "count"), [((7, 5), 0), ((8, 0), 1)])
def test_bfloat16_needs_a_gpu_that_has_tensor_cores_for_it(on_cpu, monkeypatch, capability, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert len(warned(attend(*qkv(dtype=torch.bfloat16)))) == count
