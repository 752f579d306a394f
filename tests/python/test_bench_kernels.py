"""The kernel suites of python -m plait.bench: grammar, counts, order, budget, timing, result files, toy runs.

Run by pytest (make test).
"""

import itertools
import json
import time

import pytest
import torch

pytest.importorskip("rich")
from plait.bench import contenders, iha_contenders, kernels, protocol, report, results, suites  # noqa: E402
from plait.bench.__main__ import SUITES, main  # noqa: E402
from plait.bench.cases import AttentionCase, DecodeCase, IhaCase, parse, visible_pairs  # noqa: E402
from plait.bench.config import BenchError  # noqa: E402
from plait.bench.timing import Stats  # noqa: E402

CPU = torch.device("cpu")
QUICK = protocol.Protocol(sample_ms=0.01, samples=4, warm_ms=0.01, sustained_s=0.01, rest_s=0.0, chunk_ms=0.1)
ROW = {"case", "pass", "unit", "regime", "ours", "p10", "p90", "peers", "backend"}


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    """One thread, and small yardsticks."""
    monkeypatch.setattr(report, "_COPY_BYTES", 2**20)
    monkeypatch.setitem(contenders._GEMM_SIZE, "cpu", 32)
    monkeypatch.setattr(contenders, "_MOST_SETS", 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quick(suite, path, *patterns, backends=None, regimes=("burst",), budget=60.0, peers=None):
    return kernels.Settings(suite, CPU, path, budget, list(patterns), backends, regimes, "abc", QUICK, peers)


@pytest.mark.parametrize("text, case", [
    ("B1 S16384 H16 D128 causal", AttentionCase(1, 16384, 16384, 16, 16, 128, 128, True)),
    ("B2 S8x64 H8/2 D64/32 full", AttentionCase(2, 8, 64, 8, 2, 64, 32, False)),
    ("B1 S64 H4 D64 causal window 15 varlen deterministic fp16",
     AttentionCase(1, 64, 64, 4, 4, 64, 64, True, 15, True, True, "fp16")),
    ("B3 S64 H4 D64 full varlen random", AttentionCase(3, 64, 64, 4, 4, 64, 64, False, varlen=True, random=True)),
    ("B1 Sk8192 H32/8 D128 decode page 16", DecodeCase(1, 8192, 32, 8, 128, 16)),
    ("B8 Sk64 H4/4 D64 decode fp16", DecodeCase(8, 64, 4, 4, 64, dtype="fp16")),
    ("N8192 H20 P4 D128 joint premix", IhaCase(8192, 20, 4, 128, "joint", "premix")),
    ("N8192 H20 P4 D128 interleaved window 1023 layer", IhaCase(8192, 20, 4, 128, "interleaved", "layer", 1023)),
])  # fmt: skip
def test_cases_are_spelled_as_result_files_spell_them(text, case):
    assert parse(text) == case and str(case) == text


def test_every_default_case_reads_back():
    for name in SUITES:
        chosen = suites.suite(name)
        texts = [str(entry.case) for entry in chosen.entries]
        assert [parse(text) for text in texts] == [entry.case for entry in chosen.entries]
        assert len(set(texts)) == len(texts), name
        assert all(isinstance(entry.case, chosen.kinds) for entry in chosen.entries)


@pytest.mark.parametrize("text", ["", "D128 causal", "B1 S8 H2 D16", "B1 S8 H2 D16 causal fp64", "N8 H2 P2 D16 joint"])
def test_what_is_no_case_is_a_filter(text):
    assert parse(text) is None


@pytest.mark.parametrize("text, message", [
    ("B1 S8 H2 D16 full window 3", "windows are causal"),
    ("B0 S8 H2 D16 full", "batch is 0"),
    ("B2 S8x16 H2 D16 full varlen random", "random lengths are those of queries and keys alike"),
    ("B1 S8 H3/2 D16 full", "3 query heads are no multiple of 2"),
    ("N8 H2 P0 D16 joint attention", "pseudo is 0"),
    ("N8 H2 P2 D16 joint window 3 premix", "premix has no window"),
])  # fmt: skip
def test_cases_that_cannot_exist_are_refused(text, message):
    with pytest.raises(BenchError, match=message):
        parse(text)


def test_pairs_inside_windows_are_exact():
    for sq, sk, window in itertools.product((1, 5, 8), (1, 8, 13), (0, 2, 7, 20)):
        brute = sum(row + sk - sq - window <= key <= row + sk - sq for row in range(sq) for key in range(sk))
        assert visible_pairs(sq, sk, True, window) == brute
    assert visible_pairs(8, 8, True, -1) == 32 and visible_pairs(8, 16, False, -1) == 128
    assert visible_pairs(1, 8192, True, -1) == 8192


def test_operations_and_bytes():
    floor = parse("B1 S4096 H32 D128 full fp16")
    assert floor.flops(False) == 4 * 32 * 4096**2 * 128 and floor.flops(True) == 2.5 * floor.flops(False)
    assert parse("B1 S4096 H32 D128 causal fp16").flops(False) == floor.flops(False) / 2
    wide = parse("B2 S8x64 H8/2 D64/32 full")
    assert wide.flops(False) == 2 * 2 * 8 * 8 * 64 * 96 and wide.flops(True) == 2 * 2 * 8 * 8 * 64 * (3 * 64 + 2 * 32)
    joint = parse("N8192 H20 P4 D128 joint window 1023 attention")
    plain = parse("B1 S8192 H20 D128 causal")
    assert 0.9 < joint.flops(False) / plain.flops(False) < 1.1 and joint.plain == plain
    assert joint.flops(True) == 4 * 20 * visible_pairs(8192, 8192, True, 1023) * 2 * 5 * 128
    rows = parse("N64 H2 P4 D16 interleaved window 15 attention")
    assert rows.flops(False) == parse("B1 S256 H2 D16 causal window 15").flops(False)
    premix = parse("N8192 H20 P4 D128 joint premix")
    assert premix.premix_bytes(False) == 8192 * 76800 and premix.premix_bytes(True) == 8192 * 92160
    assert parse("B8 Sk8192 H32/8 D128 decode").cache_bytes == 2 * 8 * 8192 * 8 * 128 * 2


def test_the_bars_of_the_project_are_measured_by_default():
    def texts(name):
        return {str(entry.case): entry for entry in suites.suite(name).entries}

    prefill, backward, iha, matrix = map(texts, ("prefill", "backward", "iha", "matrix"))
    for floor in ("B1 S4096 H32 D128 full fp16", "B8 S2048 H32 D128 full fp16"):
        assert prefill[floor].backends == ("auto", "cuda_mma", "cuda_naive") and prefill[floor].priority == 0
    grid = {f"B{16384 // s} S{s} H{2048 // d} D{d} {mask}"
            for s in (2048, 4096, 8192, 16384) for d in (64, 128) for mask in ("causal", "full")}  # fmt: skip
    assert grid <= set(prefill) and grid <= set(backward)
    assert all(entry[text].priority == 0 for entry in (prefill, backward) for text in grid)
    assert iha["N8192 H20 P4 D128 joint premix"].priority == 0
    for length, window in ((8192, 1023), (16384, 2049), (32768, 4225), (65536, 8577)):
        assert f"N{length} H20 P4 D128 joint window {window} attention" in iha
    assert {f"B1 S1x8192 H8 D128 {mask} fp16" for mask in ("full", "causal")} <= set(matrix) and len(matrix) == 12


@pytest.mark.parametrize("name", SUITES)
def test_what_matters_least_comes_last(name):
    chosen = suites.suite(name)
    planned = suites.tasks(chosen, chosen.entries, suites.REGIMES, False)
    keys = [(task.entry.priority, suites.REGIMES.index(task.regime)) for task in planned]
    assert keys == sorted(keys) and len(set(map(str, planned))) == len(planned)
    assert len([task for task in planned if task.regime == "burst"]) == len(chosen.passes) * len(chosen.entries)


def test_cases_are_chosen_by_words_or_named_whole():
    chosen = suites.suite("prefill")
    found = [str(entry.case) for entry in suites.select(chosen, ["D128 causal window"])]
    assert found == ["B1 S32768 H20 D128 causal window 4225"]
    (new,) = suites.select(chosen, ["B1 S64 H2 D16 causal"])
    assert new.case == parse("B1 S64 H2 D16 causal") and new.backends == ("auto",)
    (known,) = suites.select(chosen, ["B1 S4096 H32 D128 full fp16"])
    assert known.backends == ("auto", "cuda_mma", "cuda_naive")
    assert len(suites.select(chosen, ["D128 full", "D128"])) == len(suites.select(chosen, ["D128"]))
    for wrong, message in (("D1280", "matches nothing"), ("B1 Sk64 H4/2 D16 decode", "no case of this suite")):
        with pytest.raises(BenchError, match=message):
            suites.select(chosen, [wrong])


class Log:
    """Contenders that write their names down and take a given time."""

    def __init__(self, monkeypatch, **ms):
        self.order, self.now = [], 0.0
        monkeypatch.setattr(protocol.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(protocol.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(protocol.time, "sleep", lambda s: setattr(self, "now", self.now + s))
        self.contenders = {name: protocol.Contender(self._call(name, t), 1.0) for name, t in ms.items()}
        for contender in self.contenders.values():
            contender.prepare(CPU, QUICK)
        self.order.clear()

    def _call(self, name, ms):
        def call(i):
            self.order.append(name)
            self.now += ms / 1e3

        return call


def test_bursts_turn_around(monkeypatch):
    log = Log(monkeypatch, a=1.0, b=2.0)
    settings = protocol.Protocol(sample_ms=1.0, samples=4, warm_ms=3.0)
    found = protocol.burst(log.contenders, CPU, settings, 1e9)
    assert "".join(log.order) == "aaa" + "aab" + "aba" + "aab" + "aba"  # warm-up, then rounds behind one untimed call
    assert found["a"].median == pytest.approx(1.0) and found["b"].median == pytest.approx(2.0)
    assert len(found["a"].samples) == len(found["b"].samples) == 4


def test_slow_contenders_and_late_ones_get_three_samples(monkeypatch):
    log = Log(monkeypatch, slow=300.0, fast=0.5)
    settings = protocol.Protocol(samples=10, slow_ms=500.0)
    found = protocol.burst(log.contenders, CPU, settings, 1e9)
    assert len(found["slow"].samples) == 3 and len(found["fast"].samples) == 10
    found = protocol.burst(log.contenders, CPU, settings, log.now)
    assert {len(stats.samples) for stats in found.values()} == {3}


def test_sustained_runs_keep_the_last_quarter_and_the_deadline(monkeypatch):
    log = Log(monkeypatch, a=12.5, b=12.5)
    settings = protocol.Protocol()
    found = protocol.sustained(log.contenders, CPU, settings, log.now + 2.0)
    assert list(found) == ["a"] and len(found["a"].samples) == 20 and found["a"].median == pytest.approx(12.5)
    assert protocol.last_quarter([1.0] * 8) == [1.0, 1.0] and protocol.last_quarter([1.0, 9.0]) == [9.0]


def test_inputs_rotate():
    seen = []
    contender = protocol.Contender(seen.append, 1.0, ring=3)
    contender.run(7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert contenders.ring_of(100e6) == 3 and contenders.ring_of(1e9) == 1


def fake_row(
    case="B1 S64 H2 D16 causal", regime="burst", backend="cuda_mma", ours=2.0, unit="TFLOP/s", peers=None, kind="fwd"
):
    return report.row(case, kind, unit, Stats((ours,)), peers or {"fa2": 1.0}, backend, regime)


def test_budget_is_kept_and_what_it_leaves_out_is_said(monkeypatch, tmp_path, capsys):
    clock = [100.0]
    monkeypatch.setattr(kernels.time, "monotonic", lambda: clock[0])

    def measure(task, settings, deadline):
        clock[0] += 3.0 if task.regime == "burst" else 8.0
        return [fake_row(str(task.entry.case), task.regime)], []

    monkeypatch.setattr(kernels, "measure", measure)
    path = tmp_path / "new" / "prefill.json"
    assert kernels.run(quick("prefill", path, regimes=suites.REGIMES, budget=70.0)) == 0
    assert clock[0] <= 170.0
    content = json.loads(path.read_text())
    chosen = suites.suite("prefill")
    planned = [str(task) for task in suites.tasks(chosen, chosen.entries, suites.REGIMES, False)]
    done = [f"{row['case']} {row['pass']} {row['regime']}" for row in content["rows"]]
    assert done[:19] == planned[:19] and 19 <= len(done) < len(planned)  # 18 bursts of priority 0, then sustained
    left = [f"{entry['case']} {entry['pass']} {entry['regime']}" for entry in content["not_measured"]]
    assert sorted(left + done) == sorted(planned)
    out = capsys.readouterr().out
    assert out.count("not measured: ") == len(left) and "the budget of 70 s was spent" in out
    assert kernels.run(quick("prefill", tmp_path / "none.json", budget=0.5)) == 1


def test_results_are_added_to_a_file():
    first = results.add(
        {"env": {}, "rows": []}, {"commit": "a", "gpu": "g"}, [fake_row(), fake_row(backend="naive")], []
    )
    assert "not_measured" not in first and all("env" not in row for row in first["rows"])
    gone = {"pass": "fwd", "regime": "burst", "reason": "budget"}
    second = results.add(
        first, {"commit": "b", "gpu": "g"}, [fake_row(ours=3.0)],
        [{"case": "other", "backend": "auto", **gone}, {"case": "B1 S64 H2 D16 causal", "backend": "auto", **gone}],
    )  # fmt: skip
    assert [(row["backend"], row["ours"], row.get("env")) for row in second["rows"]] == [
        ("naive", 2.0, {"commit": "a"}), ("cuda_mma", 3.0, None)]  # fmt: skip
    assert [entry["case"] for entry in second["not_measured"]] == ["other"]
    third = results.add(second, {"commit": "c", "gpu": "g"}, [fake_row("other")], [])
    assert [row.get("env") for row in third["rows"]] == [{"commit": "a"}, {"commit": "b"}, None]
    assert "not_measured" not in third


def test_files_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "prefill.json"
    assert results.load(path) == {"env": {}, "rows": []}
    for text in ("{", "[]", '{"rows": {}, "env": {}}'):
        path.write_text(text)
        with pytest.raises(BenchError, match="is no result file"):
            results.load(path)


def test_some_peers_are_enough(tmp_path):
    path = tmp_path / "prefill.json"
    assert kernels.run(quick("prefill", path, "B1 S64 H4 D16 causal", peers=["gemm"])) == 0
    (row,) = results.load(path)["rows"]
    assert set(row["peers"]) == {"gemm"} and row["absent"]["fa2"] == "was not asked for"
    with pytest.raises(BenchError, match="--peers: got 'fa9', expected some of gemm, copy"):
        kernels.run(quick("prefill", path, peers=["fa9"]))


def test_folders_are_named_after_the_gpu(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert results.default_path(CPU, "prefill").as_posix() == "plait-bench/cpu/prefill.json"
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert results.default_path(torch.device("cuda"), "iha").as_posix() == "bench/results/h200/iha.json"


TOYS = [
    ("prefill", "B1 S64 H4/2 D16 causal", {"gemm", "fa2", "math"}, "TFLOP/s"),
    ("prefill", "B2 S32 H2 D16 causal window 7 varlen", {"gemm"}, "TFLOP/s"),
    ("prefill", "B5 S32 H2 D16 causal varlen random", {"gemm"}, "TFLOP/s"),
    ("backward", "B1 S64 H2 D16 causal", {"gemm", "fa2", "math"}, "TFLOP/s"),
    ("backward", "B2 S16x32 H2 D16/8 full deterministic fp32", {"gemm", "math"}, "TFLOP/s"),
    ("backward", "B2 S32 H2 D16 causal varlen", {"gemm"}, "TFLOP/s"),
    ("iha", "N32 H2 P2 D16 joint premix", {"copy", "einsum"}, "GB/s"),
    ("iha", "N32 H2 P2 D16 joint window 7 attention", {"gemm", "plait_causal", "fa2_causal"}, "TFLOP/s"),
    ("iha", "N32 H2 P2 D16 interleaved window 7 attention", {"gemm", "plait_causal", "fa2_causal"}, "TFLOP/s"),
    ("iha", "N32 H2 P2 D16 joint window 7 layer", {"gemm", "plait_causal", "fa2_causal"}, "ms"),
    ("iha", "N32 H2 P2 D16 interleaved window 7 layer fp32", {"gemm", "plait_causal", "fa2_causal"}, "ms"),
    ("decode", "B2 Sk64 H4/2 D16 decode", {"copy", "fa2", "math"}, "GB/s"),
    ("decode", "B2 Sk64 H4/2 D16 decode page 16", {"copy", "fa2", "math"}, "GB/s"),
    ("matrix", "B1 S1x64 H2 D16 causal fp16", {"gemm", "fa2", "math"}, "TFLOP/s"),
]  # fmt: skip


@pytest.mark.parametrize("suite, case, peers, unit", TOYS)
def test_toy_runs_write_rows(tmp_path, capsys, suite, case, peers, unit):
    path = tmp_path / "file.json"
    assert kernels.run(quick(suite, path, case)) == 0
    content = json.loads(path.read_text())
    assert content["env"]["commit"] == "abc" and content["env"]["read_tb_s"] > 0
    passes = suites.suite(suite).passes
    assert [(row["case"], row["pass"]) for row in content["rows"]] == [(case, kind) for kind in passes]
    for row in content["rows"]:
        assert ROW <= set(row) <= ROW | {"absent"}
        assert row["unit"] == unit and row["regime"] == "burst" and row["backend"] == "cpu"
        assert set(row["peers"]) == peers and all(value > 0 for value in row["peers"].values())
        low, high = min(row["p10"], row["p90"]), max(row["p10"], row["p90"])
        assert 0 < low <= row["ours"] <= high
        assert not set(row["absent"] if "absent" in row else ()) & peers
    assert case in capsys.readouterr().out


def test_every_backend_gets_a_row_and_refusals_are_recorded(tmp_path, capsys):
    path = tmp_path / "file.json"
    case = "B1 S16 H2 D16 causal fp32"
    backends = ["auto", "cpu", "reference", "cuda_mma"]
    assert kernels.run(quick("prefill", path, case, backends=backends, regimes=suites.REGIMES)) == 0
    content = json.loads(path.read_text())
    rows = {(row["backend"], row["regime"]): row for row in content["rows"]}
    assert set(rows) == set(itertools.product(("cpu", "reference"), suites.REGIMES))
    assert rows["cpu", "burst"]["peers"]["reference"] == rows["reference", "burst"]["ours"]
    assert set(rows["cpu", "burst"]["absent"]) == {"cudnn", "efficient"}
    assert set(rows["cpu", "sustained"]["peers"]) == {"reference", "gemm", "fa2"}
    assert [(entry["backend"], entry["regime"]) for entry in content["not_measured"]] == [
        ("cuda_mma", "burst"), ("cuda_mma", "sustained")]  # fmt: skip
    assert "cuda_mma cannot serve" in content["not_measured"][0]["reason"]
    assert "not measured: B1 S16 H2 D16 causal fp32 fwd burst, cuda_mma" in capsys.readouterr().out


def test_peers_compute_what_plait_computes():
    """The contenders of one case are the same function, so that their times may be compared."""
    for kind, text in itertools.product(("fwd", "bwd"), ("B2 S32 H4/2 D16 causal fp32", "B2 S16x32 H2 D16 full fp32")):
        makers, refused = contenders.contenders_of(parse(text), kind, CPU, ["auto"])
        ours, math = (makers[name]().call(0) for name in ("ours:cpu", "math"))
        for a, b in zip(ours, math, strict=True) if kind == "bwd" else [(ours, math)]:
            torch.testing.assert_close(a, b.transpose(1, 2), rtol=1e-4, atol=1e-5)
        assert not refused
    makers, _ = contenders.contenders_of(parse("B2 Sk64 H4/2 D16 decode page 16 fp32"), "fwd", CPU, ["auto"])
    assert makers["ours:cpu"]().call(1).shape == (2, 1, 4, 16)
    makers, _ = contenders.contenders_of(parse("B2 Sk64 H4/2 D16 decode fp32"), "fwd", CPU, ["auto"])
    torch.testing.assert_close(makers["ours:cpu"]().call(2), makers["math"]().call(2).transpose(1, 2))
    for kind in ("fwd", "bwd"):
        makers, _ = iha_contenders.contenders_of(parse("N32 H4 P2 D16 joint premix fp32"), kind, CPU, ["auto"])
        for a, b in zip(makers["ours:cpu"]().call(1), makers["einsum"]().call(1), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_device_that_fails_ends_the_run(monkeypatch, tmp_path):
    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kernels, "synchronize", broken)
    with pytest.raises(BenchError, match="the device failed"):
        kernels.run(quick("prefill", tmp_path / "file.json", "B1 S16 H2 D16 causal"))


def test_command_line(tmp_path, capsys):
    path = tmp_path / "deep" / "prefill.json"
    arguments = ["--device", "cpu", "--json", str(path), "--cases", "B1 S16 H2 D16 causal", "--regime", "burst"]
    begin = time.monotonic()
    assert main(["prefill", *arguments, "--budget", "20"]) == 0
    assert time.monotonic() - begin < 20
    assert "wrote 1 rows" in capsys.readouterr().out and path.is_file()
    assert main(["iha", "--device", "cpu", "--json", str(path), "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0] == "N8192 H20 P4 D128 joint premix fwd burst auto" and len(listed) > 30
    for extra, message in (
        (["--cases", "nothing here"], "matches nothing"),
        (["--budget", "-1"], "--budget: got -1.0"),
        (["--json", str(path / "below" / "x.json")], "--json: cannot write to"),
    ):
        assert main(["prefill", *arguments, *extra]) == 2
        assert message in capsys.readouterr().err
