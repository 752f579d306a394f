"""python -m plait.bench: tables, result files, plots, the verdict, and one clear error per bad setting.

Run by pytest (make test).
"""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

for needed in ("transformers", "matplotlib", "rich"):
    pytest.importorskip(needed)
import plait  # noqa: E402
from plait.bench import config, data, report, timing  # noqa: E402
from plait.bench.__main__ import main  # noqa: E402

SMALL = ["--hidden", "32", "--heads", "2", "--layers", "2", "--B", "2", "--N", "32", "--P", "2", "--n-iter", "2"]
ENV = {"gpu", "driver", "cuda", "torch", "cudnn", "commit", "date", "read_tb_s", "copy_tb_s"}
ROW = {"case", "pass", "unit", "regime", "ours", "p10", "p90", "peers", "backend"}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """One thread, as in small work threads only wait for each other, and a short memory test."""
    monkeypatch.setattr(report, "_COPY_BYTES", 2**20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 200)
    return str(path)


LAYER_ROWS = [("train", f"layer_{part}") for part in ("attention", "rest", "total")]


def check_result(path, suite_rows):
    content = json.loads(path.read_text())
    assert set(content["env"]) >= ENV and content["env"]["copy_tb_s"] > 0
    assert content["env"]["torch"] == torch.__version__
    for row in content["rows"]:
        assert set(row) >= ROW
        assert (
            row["unit"] in ("ms", "nats", "TFLOP/s", "us/tile") and row["regime"] == "burst" and row["backend"] == "cpu"
        )
        assert 0 < row["p10"] <= row["ours"] <= row["p90"]
        assert all(value > 0 for value in row["peers"].values())
    assert {(row["case"], row["pass"]) for row in content["rows"]} == suite_rows
    assert not list(path.parent.glob("*.tmp"))
    return content


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_llama_writes_table_json_and_plot(tmp_path, capsys, text):
    arguments = ["llama", *SMALL, "--iha_frac", "0.5", "--n_iter", "2", "--train-steps", "9", "--text", text]
    assert main([*arguments, "--device", "cpu", "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    for expected in ("IHA: P 2, joint, window 31, layers [1]", "premix", "attention", "rest", "step ms", "prefill ms",
                     "decode ms", "tok/s", "WSL", "held-out loss: plait ", "held-out unigram entropy: "):  # fmt: skip
        assert expected in out
    assert "not judged, too few train steps" in out or "PASS" in out
    folder = tmp_path / "new" / "folder"
    assert is_png(folder / "llama.png")
    names = [f"N32 {frac} joint" for frac in ("frac0.5", "frac0")]
    expected = {
        (f"{name} {task}", kind)
        for name in names
        for task, kind in (
            ("train", "step"),
            ("train", "held_out_loss"),
            ("prefill", "prefill"),
            ("decode", "decode"),
            *LAYER_ROWS,
        )
    }
    expected.add(("N32 frac0.5 joint train", "layer_premix"))
    content = check_result(folder / "llama.json", expected)
    step = next(row for row in content["rows"] if row["case"] == "N32 frac0.5 joint train")
    assert set(step["peers"]) == {"sdpa", "plait"}
    assert content["config"]["window"] == plait.flop_matched_window(32, 2)[0] == 31
    layer = content["layer_ms"]
    assert layer["iha"]["premix"] > 0 and layer["plait"]["premix"] == layer["sdpa"]["premix"] == 0
    for parts in layer.values():
        assert parts["attention"] > 0 and parts["rest"] > 0
    curves = content["curves"]
    assert set(curves) == {"plait", "iha"}
    for curve in curves.values():
        assert curve["steps"][0] == 0 and curve["steps"][-1] == 9
        assert curve["losses"][-1] < curve["losses"][0]
        assert abs(curve["losses"][0] - math.log(256)) < 2


def test_llama_compares_shares_of_iha_layers_and_adds_to_a_suite_file(tmp_path, capsys, text):
    suite = tmp_path / "results" / "llama.json"
    arguments = ["llama", *SMALL, "--text", text, "--device", "cpu", "--train-steps", "0", "--out", str(tmp_path)]
    for length in ("32", "16"):  # one length a call
        arguments_now = [*arguments, "--n", length, "--iha-frac", "0.5,1", "--json", str(suite), "--commit", "abc"]
        assert main(arguments_now) == 0
    out = capsys.readouterr().out
    assert out.count("IHA 0.5") == 2 and "layers [0, 1]" in out and "not measured" not in out
    content = json.loads(suite.read_text())
    steps = {row["case"]: row for row in content["rows"] if row["pass"] == "step"}
    assert set(steps) == {f"N{n} frac{share} joint train" for n in (16, 32) for share in ("0", "0.5", "1")}
    assert set(steps["N32 frac1 joint train"]["peers"]) == {"sdpa", "plait"}
    assert len({(row["case"], row["pass"]) for row in content["rows"]}) == len(content["rows"])
    single = json.loads((tmp_path / "llama.json").read_text())
    assert set(single["layer_ms"]) == {"sdpa", "plait", "iha0.5", "iha1"} == set(single["peak_gib"])


def test_llama_says_what_the_budget_left_out(tmp_path, capsys, text, monkeypatch):
    from plait.bench import llama

    begun = []

    def slow(config, kind, *rest):
        begun.append(kind)
        return measured(config, kind, *rest)

    measured = llama.measure_kind
    clock = iter(range(0, 10000, 5))
    monkeypatch.setattr(llama, "measure_kind", slow)
    monkeypatch.setattr(llama.time, "monotonic", lambda: float(next(clock)))
    arguments = ["llama", *SMALL, "--text", text, "--device", "cpu", "--train-steps", "0", "--out", str(tmp_path)]
    assert main([*arguments, "--budget", "11"]) == 0
    assert begun == ["sdpa", "plait"][: len(begun)] and begun
    assert "not measured: IHA 0.5: the budget of 11 s was spent" in capsys.readouterr().out


@pytest.mark.parametrize("length", [9, 33])
def test_loss_in_chunks_is_the_loss_of_transformers(monkeypatch, length):
    from plait.bench import models

    small = config.build_config("tiny", {"hidden": 32, "heads": 2, "layers": 1, "N": length})
    model = models.build(small, "plait", torch.device("cpu"))
    ids = torch.randint(0, 256, (2, length), generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    gradients = []
    for chunk in (4096, 8):
        monkeypatch.setattr(models, "LOSS_CHUNK", chunk)
        loss = models.causal_loss(model, ids)
        loss.backward()
        torch.testing.assert_close(loss, model(ids, labels=ids, use_cache=False).loss)
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_memory_of_the_big_model_is_counted_before_it_is_built():
    from plait.bench import devices

    def gib(length, frac):
        return devices.training_bytes(config.build_config("2.4b", {"N": length, "iha_frac": frac})) / 2**30

    assert devices.parameters(config.PRESETS["2.4b"]) == 2_384_199_680
    assert 19 < gib(8192, 0.0) < gib(8192, 0.5) == gib(8192, 0.8) < 26
    assert 40 < gib(65536, 0.8) < 72  # fits a GPU of 80 GB


def test_samples_stop_in_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call():
        clock[0] += 2.0

    assert len(timing.sample(call, torch.device("cpu"), 9, warmup=0, until=7.0).samples) == 3
    assert len(timing.sample(call, torch.device("cpu"), 9, warmup=1, until=0.0).samples) == 1
    assert len(timing.sample(call, torch.device("cpu"), 4).samples) == 4


def test_llama_judges_the_losses(tmp_path, capsys, text, monkeypatch):
    monkeypatch.setitem(config.PRESETS, "tiny", dataclasses.replace(config.PRESETS["tiny"], train_steps=40))
    arguments = ["llama", *SMALL, "--text", text, "--out", str(tmp_path), "--n-iter", "1"]
    small = ["--N", "16", "--layers", "1", "--iha-layers", "0"]
    assert main([*arguments, *small, "--lr", "0.03"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main([*arguments, *small, "--lr", "1e-9"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main([*arguments, "--train-steps", "0"]) == 0
    assert "not trained" in capsys.readouterr().out
    assert json.loads((tmp_path / "llama.json").read_text())["curves"] == {}


def test_training_is_repeatable(tmp_path, text):
    losses = []
    for name in ("a", "b"):
        arguments = ["llama", *SMALL, "--train-steps", "3", "--n-iter", "1", "--text", text, "--seed", "4"]
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
        losses.append(json.loads((tmp_path / name / "llama.json").read_text())["curves"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_sweep_writes_every_setting(tmp_path, capsys, text, mode):
    arguments = ["sweep", *SMALL, "--P", "1,2", "--iha-frac", "0,0.5,1", "--N", "16,32", "--n-iter", "1"]
    assert main([*arguments, "--mode", mode, "--text", text, "--out", str(tmp_path)]) == 0
    assert "sweep of 12 settings" in capsys.readouterr().out
    assert is_png(tmp_path / "sweep.png")
    expected = {
        (f"N{n} frac{frac} {mode} {task}", kind)
        for n in (16, 32)
        for frac in ("0", "0.5", "1")
        for task, kind in (("train", "step"), ("prefill", "prefill"), ("decode", "decode"), *LAYER_ROWS)
    }
    expected |= {(f"N{n} frac{frac} {mode} train", "layer_premix") for n in (16, 32) for frac in ("0.5", "1")}
    rows = check_result(tmp_path / "sweep.json", expected)["rows"]
    assert {(row["P"], row["window"]) for row in rows if "N32" in row["case"]} >= {(1, -1)}
    assert len(rows) >= 2 * 2 * 2 * 3


def test_cpu_measures_beside_sdpa(tmp_path, capsys):
    path = tmp_path / "results" / "cpu.json"
    arguments = ["cpu", "--json", str(path), "--seqlen", "64,96", "--head-dim", "16", "--samples", "3"]
    assert main([*arguments, "--dtype", "float32,bfloat16"]) == 0
    assert "plait/SDPA" in capsys.readouterr().out
    cases = {f"B1 S{s} H8 D16 causal {dtype}" for s in (64, 96) for dtype in ("fp32", "bf16")}
    options = {f"B1 S64 H8 D16 causal {option} fp32" for option in ("varlen", "softcap", "sinks")}
    rows = check_result(path, {(case, kind) for case in cases | options for kind in ("fwd", "bwd")})["rows"]
    for row in rows:
        peers, unit = ({"plain"}, "us/tile") if row["case"] in options else ({"gemm", "sdpa"}, "TFLOP/s")
        assert set(row["peers"]) == peers and row["unit"] == unit
    assert main(["cpu", "--json", str(path), "--seqlen", "64", "--head-dim", "16", "--samples", "1"]) == 0
    kept = json.loads(path.read_text())["rows"]
    assert {(row["case"], row["pass"]) for row in kept} == {(row["case"], row["pass"]) for row in rows}


def test_visited_tiles_of_the_cpu_backend():
    from plait.bench.cpu import _visited_tiles

    assert _visited_tiles([64]) == _visited_tiles([1]) == 1 and _visited_tiles([]) == 0
    assert _visited_tiles([256]) == 1 + 1 + 2 + 2 and _visited_tiles([129, 65]) == (1 + 1 + 2) + (1 + 1)


BAD = [
    (["llama", "--P", "0"], "--P: got 0, expected at least 1"),
    (["llama", "--iha-frac", "1.5"], "--iha-frac: got 1.5"),
    (["llama", "--iha_frac", "-0.1"], "--iha-frac: got -0.1"),
    (["llama", "--preset", "huge"], "--preset: got 'huge', known presets: tiny, 2.4b"),
    (["llama", "--N", "6", "--P", "4"], "--N: got 6, a FLOP-matched window for P 4 needs at least 2 x P = 8"),
    (["llama", "--N", "0"], "--N: got 0"),
    (["llama", "--heads", "4", "--kv-heads", "3"], "--heads: got 4, expected a multiple of --kv-heads 3"),
    (["llama", "--hidden", "100", "--heads", "8"], "--hidden: got 100"),
    (["llama", "--wsl", "wide"], "--wsl: got 'wide'"),
    (["llama", "--wsl", "-2"], "--wsl: got '-2'"),
    (["llama", "--iha-layers", "odd"], "--iha-layers: got 'odd'"),
    (["llama", "--iha-layers", "0,9"], "--iha-layers: got 9, the model has layers 0 to 3"),
    (["llama", "--iha-layers", "0", "--iha-frac", "0.5"], "give one"),
    (["llama", "--mode", "mixed"], "--mode: got 'mixed'"),
    (["llama", "--train-steps", "-1"], "--train-steps: got -1"),
    (["llama", "--lr", "0"], "--lr: got 0.0"),
    (["llama", "--vocab", "100"], "--vocab: got 100"),
    (["llama", "--device", "tpu"], "--device: got 'tpu'"),
    (["llama", "--device", "mps"], "--device: got 'mps'"),
    (["llama", "--hidden", "65536", "--layers", "80"], "parameters in float32 need about"),
    (["llama", "--text", "/nowhere/text.txt"], "--text: cannot read /nowhere/text.txt"),
    (["sweep", "--P", "1,0"], "--P: got 0"),
    (["sweep", "--iha-frac", "0.5,2"], "--iha-frac: got 2.0"),
    (["sweep", "--N", "4,256", "--P", "4"], "--N: got 4"),
    (["llama", "--preset", "2.4b", "--N", "4194304"], "to train on 1 x 4194304 tokens"),
    (["llama", "--iha-frac", "0.5,2"], "--iha-frac: got 2.0"),
    (["llama", "--budget", "0"], "--budget: got 0.0"),
    (["cpu", "--samples", "0"], "--samples: got 0"),
    (["cpu", "--seqlen", "64,0"], "--seqlen: got 0"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_settings_are_refused(arguments, message, tmp_path, capsys):
    place = (
        ["--json", str(tmp_path / "out" / "cpu.json")] if arguments[0] == "cpu" else ["--out", str(tmp_path / "out")]
    )
    assert main([*arguments, *place]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unwritable_folder_and_missing_cuda_are_refused(tmp_path, capsys, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["llama", "--out", str(blocked / "below")]) == 2
    assert f"--out: cannot write to {blocked / 'below'}" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["llama", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    assert "sees no CUDA device; use --device cpu" in capsys.readouterr().err


def test_device_that_the_build_cannot_serve(tmp_path, capsys, monkeypatch):
    from plait.bench import devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "refusal", lambda device, dtype: "backend: no CUDA backend is built")
    assert main(["llama", "--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "cannot serve 'cuda': backend: no CUDA backend is built" in capsys.readouterr().err
    assert devices.pick_device("auto", torch.float32) == torch.device("cpu")


def test_text_too_short_is_refused(tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert main(["llama", "--text", str(short), "--out", str(tmp_path / "out")]) == 2
    assert "gives 9 bytes to train on and 0 held out" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["llama", "--help"], ["sweep", "--help"], ["cpu", "--help"]])
def test_help_names_the_options(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0
    out = capsys.readouterr().out
    if arguments == ["--help"]:
        assert "examples:" in out and "plait.bench sweep --P 1,2,4,8" in out
    elif arguments[0] == "llama":
        assert all(option in out for option in ("--iha-frac", "--iha_frac", "--n-iter", "--n_iter", "--wsl", "--text"))


@pytest.mark.parametrize("arguments", [[], ["train"], ["llama", "--P", "two"], ["cpu", "--dtype", "float64"]])
def test_command_line_mistakes_exit_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "plait.bench", "llama", "--P", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "plait.bench llama: error: --P: got 0, expected at least 1\n"


@pytest.mark.parametrize("length, P, left", [
    (8192, 4, 1023), (16384, 4, 2049), (32768, 4, 4225), (65536, 4, 8577), (8192, 1, -1)])  # fmt: skip
def test_automatic_window_is_flop_matched(length, P, left):
    assert config.build_config("2.4b", {"N": length, "P": P}).window == left


def test_windows_and_layers_follow_the_options():
    build = config.build_config
    assert build("tiny", {"wsl": "none"}).window == -1
    assert build("tiny", {"wsl": "63"}).window == 63
    interleaved = build("2.4b", {"N": 32768, "mode": "interleaved"})
    assert interleaved.window == 4095
    assert build("2.4b", {"iha_frac": 0.25}).chosen_layers == [2, 6, 10, 14, 18, 22, 26]
    assert build("2.4b", {"iha_frac": 0.25, "iha_layers": "first"}).chosen_layers == [0, 1, 2, 3, 4, 5, 6]
    assert build("tiny", {"iha_layers": "3,0,3"}).chosen_layers == [0, 3]
    assert build("tiny", {"iha_frac": 0.0}).chosen_layers == []
    assert build("tiny", {"iha_frac": 1.0}).chosen_layers == [0, 1, 2, 3]
    assert build("tiny", {"heads": 2}).kv_heads == 2
    big = config.PRESETS["2.4b"]
    assert (big.hidden, big.heads, big.layers, big.intermediate, big.vocab, big.dtype) == (
        2560, 20, 28, 6912, 32000, "bfloat16")  # fmt: skip


def test_held_out_text_is_never_trained_on(tmp_path):
    corpus = data.load_corpus(None, 256)
    again = data.load_corpus(None, 256)
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.held_out, again.held_out)
    assert 0.03 < len(corpus.held_out) / len(corpus.train) < 0.3
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(200)))
    corpus = data.load_corpus(str(path), 8)
    assert corpus.train.tolist() == list(range(180)) and corpus.held_out.tolist() == list(range(180, 200))
    assert abs(corpus.unigram_entropy() - math.log(20)) < 1e-12
    batches = list(data.training_batches(corpus, 8, 3, 50, 0, False))
    assert len(batches) == 50 and all(batch.shape == (3, 8) for batch in batches)
    assert max(int(batch.max()) for batch in batches) < 180
    held_out = torch.cat(data.held_out_batches(corpus, 8, 3))
    assert held_out.shape == (2, 8) and int(held_out.min()) >= 180
    assert held_out[0, -1] < held_out[1, 0]
    assert torch.equal(held_out[0], held_out[0, 0] + torch.arange(8))


def test_statistics_and_interleaving():
    stats = timing.Stats((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (stats.median, stats.quantile(0.0), stats.quantile(1.0), stats.quantile(0.1)) == (3.0, 1.0, 5.0, 1.4)
    assert stats.map(lambda value: 1 / value).median == 1 / 3
    order = []
    functions = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timing.sample_interleaved(functions, torch.device("cpu"), 3, warmup=0)
    assert "".join(order) == "ababab"


def test_files_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    report.write_json(path, {"rows": [1]})
    with pytest.raises(ValueError):
        report.write_json(path, {"rows": [float("nan")]})
    with pytest.raises(TypeError):
        report.write_json(path, {"rows": [object()]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
