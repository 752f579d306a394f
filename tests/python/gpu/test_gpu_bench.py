"""The benchmarks on the GPU: kernel suites on toy shapes, and small LLaMAs that train as they do on the CPU.

Run by pytest (make gpu-test).
"""

import dataclasses
import json

import pytest
import torch

for needed in ("transformers", "rich"):
    pytest.importorskip(needed)
from plait.bench import config, contenders, data, kernels, measure, models, protocol, report, suites  # noqa: E402
from plait.bench.cases import parse  # noqa: E402

GPU = torch.device("cuda")
QUICK = protocol.Protocol(sample_ms=0.5, samples=4, warm_ms=1.0, sustained_s=0.02, rest_s=0.0, chunk_ms=1.0)
STEPS = 8
pytestmark = pytest.mark.names_its_device


@pytest.mark.parametrize("suite, case, peers", [
    ("prefill", "B1 S512 H4 D64 causal", {"gemm", "cudnn", "fa2", "math"}),
    ("prefill", "B1 S512 H4/2 D128 causal window 127 fp16", {"gemm", "fa2"}),
    ("backward", "B2 S256 H4 D64 full", {"gemm", "cudnn", "fa2", "math"}),
    ("backward", "B1 S512 H4 D128 causal window 127", {"gemm", "fa2"}),
    ("backward", "B2 S256 H4 D64 causal varlen", {"gemm", "fa2"}),
    ("iha", "N512 H4 P2 D64 joint premix", {"copy", "einsum"}),
    ("iha", "N512 H4 P2 D64 joint window 127 attention", {"gemm", "fa2_heads", "plait_causal", "fa2_causal"}),
    ("iha", "N512 H4 P2 D64 interleaved window 127 attention", {"gemm", "fa2", "plait_causal", "fa2_causal"}),
    ("iha", "N512 H4 P2 D64 joint window 127 layer", {"gemm", "plait_causal", "fa2_causal"}),
])  # fmt: skip
def test_toy_suites(tmp_path, monkeypatch, suite, case, peers):
    monkeypatch.setattr(report, "_COPY_BYTES", 2**20)
    monkeypatch.setitem(contenders._GEMM_SIZE, "cuda", 512)
    path = tmp_path / "file.json"
    settings = kernels.Settings(suite, GPU, path, 60.0, [case], None, suites.REGIMES, "abc", QUICK)
    assert kernels.run(settings) == 0
    content = json.loads(path.read_text())
    assert not content.get("not_measured")
    passes = suites.suite(suite).passes
    assert {(row["pass"], row["regime"]) for row in content["rows"]} == {
        (kind, regime) for kind in passes for regime in suites.REGIMES
    }
    for row in content["rows"]:
        assert row["backend"].startswith("cuda_") and 0 < row["ours"]
        assert row["regime"] == "sustained" or peers <= set(row["peers"])


def test_short_calls_are_recorded_in_a_graph():
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        for kind, text in (("fwd", "B1 S256 H2 D64 causal fp16"), ("bwd", "B1 S256 H2 D64 causal fp16")):
            makers, refused = contenders.contenders_of(parse(text), kind, GPU, ["auto"])
            ours = next(make for name, make in makers.items() if name.startswith(contenders.OURS))()
            ours.prepare(GPU, protocol.Protocol())
            assert not refused and ours.calls == 20


def losses(settings, kind, state, device):
    """Loss of each step, from the same weights and the same batches."""
    model = models.build(settings, kind, torch.device(device))
    model.load_state_dict(state)
    model.train()
    models.enable_checkpointing(model)
    optimizer = models.make_optimizer(model, settings.lr, torch.device(device))
    corpus = data.load_corpus(None, settings.N)
    batches = data.training_batches(corpus, settings.N, settings.B, STEPS, settings.seed, False)
    return torch.stack([measure.train_step(model, optimizer, batch, torch.device(device)).cpu() for batch in batches])


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kind, mode", [("plait", "joint"), ("iha", "joint"), ("iha", "interleaved")])
def test_losses_of_gpu_and_cpu_agree(kind, mode, dtype, tolerance):
    settings = dataclasses.replace(config.PRESETS["tiny"], dtype=dtype, mode=mode, lr=1e-3)
    state = models.build(settings, kind, torch.device("cpu")).state_dict()
    cpu, gpu = (losses(settings, kind, state, device) for device in ("cpu", "cuda"))
    assert torch.isfinite(cpu).all() and cpu[-1] < cpu[0] - 0.2
    torch.testing.assert_close(gpu, cpu, rtol=tolerance, atol=0.0)
