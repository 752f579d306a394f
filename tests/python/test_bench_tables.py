"""Tables and plots that python -m plait.bench makes of result files.

Run by pytest (make test).
"""

import random

import pytest

for needed in ("matplotlib", "rich"):
    pytest.importorskip(needed)
from plait.bench import kernels, plots, report, results, suites, tables  # noqa: E402
from plait.bench.__main__ import SUITES, main  # noqa: E402
from plait.bench.timing import Stats  # noqa: E402

ENV = {"gpu": "NVIDIA H200", "cpu": "x", "torch": "2.11.0+cu130", "cudnn": 91900, "date": "2026-11-30T01:02:03Z"}
RATES = {"gemm": 790.0, "cudnn": 500.0, "fa2": 250.0}
MS = {"cudnn_causal": 3.0, "plait_causal": 4.0}


def rows_of(name):
    """Every row that a suite's default run would write, 400 TFLOP/s everywhere."""
    chosen = suites.suite(name)
    for task in suites.tasks(chosen, chosen.entries, suites.REGIMES, False):
        unit = kernels.unit_of(task.entry.case)
        ours = 6.0 if unit == "ms" else 3400.0 if unit == "GB/s" else 400.0
        peers = MS if unit == "ms" else {"einsum": 850.0, "copy": 4250.0} if unit == "GB/s" else RATES
        peers = peers | dict.fromkeys(task.entry.strategies, 410.0)
        peers = peers | ({"fa2_heads": 200.0} if name == "iha" and unit == "TFLOP/s" else {})
        if "cuda_naive" in task.entry.backends:
            peers = peers | {"cuda_naive": 4.0}
            yield report.row(str(task.entry.case), task.kind, unit, Stats((4.0,)), {}, "cuda_naive", task.regime)
        yield report.row(str(task.entry.case), task.kind, unit, Stats((ours,)), peers, "cuda_mma", task.regime)


def llama_rows():
    for length, step in ((8192, 440.0), (65536, 7616.0)):
        for fraction, factor in (("0", 1.1), ("0.5", 1.2), ("0.8", 1.25)):
            case = f"N{length} frac{fraction} joint"
            peers = {"cudnn": step} if fraction == "0" else {"cudnn": step, "plait": step * 1.1}
            yield report.row(f"{case} train", "step", "ms", Stats((step * factor,)), peers, "cuda_mma")
            yield report.row(f"{case} prefill", "prefill", "ms", Stats((90.0,)), {"cudnn": 80.0}, "cuda_mma")
            yield report.row(f"{case} decode", "decode", "ms", Stats((12.0,)), {"cudnn": 11.0}, "cuda_mma")
            for part in ("attention", "rest") if fraction == "0" else ("premix", "attention", "rest"):
                peers = {} if part == "premix" else {"cudnn": 1.5}
                yield report.row(f"{case} train", f"layer_{part}", "ms", Stats((2.5,)), peers, "cuda_mma")


@pytest.fixture
def folder(tmp_path):
    for name in SUITES:
        results.write(tmp_path / "h200" / f"{name}.json", {"env": ENV, "rows": list(rows_of(name))})
    results.write(tmp_path / "h200" / "llama.json", {"env": ENV, "rows": list(llama_rows())})
    return tmp_path / "h200"


@pytest.mark.parametrize(
    "foreign",
    ['{"rows": [{"a": 1}], "env": {}}', '{"rows": [1], "env": {}}', '{"rows": {}, "env": []}', "[]",
     '{"rows": [{"case": "x", "pass": "forward", "regime": "burst", "backend": "auto"}], "env": {"date": 3}}'],
)  # fmt: skip
def test_foreign_files_are_refused_and_the_readme_stays(foreign, folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(before := f"a\n{tables.BEGIN}\n{tables.END}\nb\n")
    (folder / "prefill.json").write_text(foreign)
    for command in (["tables", "--readme", str(readme), "--results", str(folder)],
                    ["plots", "--results", str(folder), "--out", str(tmp_path / "plots")]):  # fmt: skip
        assert main(command) == 2
        assert "result" in capsys.readouterr().err and readme.read_text() == before


def test_tables_hold_every_bar(folder):
    text = tables.render(folder)
    for line in (
        "Measured on NVIDIA H200, 2026-11-30, torch 2.11.0+cu130, cuDNN 9.19",
        'in 20 shapes `strategy="auto"` ran at 98% or more of the faster of split_q',
        "| forward, D 128, causal | 400 (1.60x) | 400 (1.60x) | 400 (1.60x) | 400 (1.60x) |",
        "| B8 Sk32768 H32/8 D128 decode, fwd | 3,400 | - | - |",
        "| B1 S8192 H8 D512 causal, bwd | 400 | - | - |",
        "| backward, D 64, full | 400 (1.60x) | 400 (1.60x) | 400 (1.60x) | 400 (1.60x) |",
        "| B1 S4096 H32 D128 full fp16 | 400 | 4.0 | 100x |",
        "| premix, N 8192, bwd | 3,400 GB/s | 4.00x | 80% |",
        "| attention, N 65536, fwd | 400 TFLOP/s | 2.00x | - |",
        "| layer, N 8192, fwd | 6 ms | 0.50x | - |",
        "| B1 S4096 H32 D128 full fp16 | cuda_mma | 687 us (400) | 68,719 us (4) | 550 us (500) | 1,100 us (250) |",
        "| 8192 | SDPA (cuDNN) | 440 | 1.000 | 80.00 | 11.00 | - | 1.50 | 1.50 |",
        "| 8192 | plait | 484 | 1.100 | 90.00 | 12.00 | - | 2.50 | 2.50 |",
        "| 65536 | IHA in 80% | 9520 | 1.250 | 90.00 | 12.00 | 2.50 | 2.50 | 2.50 |",
    ):
        assert line in text, line
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    assert "cuda_naive |" not in text.split("IHA, joint")[1].split("Forward, fp16")[0]


def test_tables_skip_what_was_not_measured(tmp_path):
    rows = [row for row in rows_of("prefill") if "S2048" in row["case"] and row["regime"] == "burst"]
    for row in rows:
        row["peers"].pop("fa2", None)
    results.write(tmp_path / "prefill.json", {"env": ENV | {"cudnn": None}, "rows": rows})
    text = tables.render(tmp_path)
    assert "| forward, D 64, causal | 400 (-) | - | - | - |" in text and "cuDNN" not in text.splitlines()[1]
    assert "LLaMA" not in text and "backward" not in text


def test_readme_is_changed_between_its_markers_only(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"# head\n\n{tables.BEGIN}\nstale\n{tables.END}\n\ntail\n")
    arguments = ["tables", "--results", str(folder), "--readme", str(readme)]
    assert main(arguments) == 0
    made = readme.read_text()
    assert made.startswith(f"# head\n\n{tables.BEGIN}\n\nMeasured on") and made.endswith(f"|\n\n{tables.END}\n\ntail\n")
    assert "stale" not in made
    assert main(arguments) == 0 and readme.read_text() == made
    readme.write_text("no markers\n")
    assert main(arguments) == 2 and "lacks the two lines" in capsys.readouterr().err
    assert main([*arguments[:3], "--readme", str(tmp_path / "none.md")]) == 2
    assert main(["tables", "--results", str(tmp_path), "--readme", str(readme)]) == 2
    assert readme.read_text() == "no markers\n"


def test_plots_are_drawn_once_and_for_all(folder, tmp_path, capsys):
    out = tmp_path / "plots"
    arguments = ["plots", "--results", str(folder.parent), "--out", str(out)]
    assert main(arguments) == 0
    made = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    assert made == sorted(f"h200/{name}.svg" for name in (*SUITES, "llama"))
    first = {name: (out / name).read_bytes() for name in made}
    assert all(b"<svg" in content and b"cuda_mma" in content for name, content in first.items() if "llama" not in name)
    assert b"plait IHA 80%" in first["h200/llama.svg"]
    assert main(arguments) == 0
    assert {name: (out / name).read_bytes() for name in made} == first
    assert main(["plots", "--results", str(tmp_path / "nothing"), "--out", str(out)]) == 2


def test_panels_run_over_lengths():
    rows = list(rows_of("prefill"))
    random.Random(0).shuffle(rows)
    panels = plots.panels_of(tables.best(rows))
    lines = panels["H D 2048, D 128, causal\nfwd, TFLOP/s"]
    lengths = ["512", "1024", "2048", "4096", "8192", "16384"]
    assert [place for place, _ in lines["plait cuda_mma"]] == lengths == [place for place, _ in lines["gemm"]]
    assert "H D 2048, D 128, causal\nfwd, TFLOP/s, sustained" in panels
