"""The plait command, driven as a user does: output, JSON, exit codes, one line for each refusal.

The program is the one that the installed package carries; see tools/cli.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = next(
    path
    for folder in importlib.util.find_spec("plait").submodule_search_locations
    if (path := Path(folder) / "bin" / "plait").is_file()
)


def run(*arguments, program=PROGRAM):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def succeed(*arguments):
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def words(text):
    """Shell-like arguments without quoting."""
    return text.split()


def test_version_and_the_command_on_the_path():
    assert succeed("--version") == "plait 0.1.0\n"
    on_path = run("--version", program=Path(sys.executable).parent / "plait")
    assert (on_path.returncode, on_path.stdout) == (0, "plait 0.1.0\n")


def test_the_command_on_the_path_passes_arguments_and_exit_codes_on():
    on_path = Path(sys.executable).parent / "plait"
    assert run("window", "--P", 4, "--json", 8192, program=on_path).stdout == succeed(
        "window", "--P", 4, "--json", 8192
    )
    assert run("window", 0, program=on_path).returncode == 2


@pytest.mark.parametrize("command", ["", "doctor", "explain", "window", "check", "bench"])
def test_help_has_examples_that_name_the_command(command):
    text = succeed(*command.split(), "--help")
    examples = text.split("Example")[1]
    assert f"\n  plait {command}" in examples


@pytest.mark.parametrize("command", ["explain", "window", "check"])
def test_examples_of_the_help_run(command):
    examples = succeed(command, "--help").split("Examples:\n")[1]
    commands = re.findall(r"^  plait (.*)$", examples, re.MULTILINE)
    assert len(commands) >= 2
    for arguments in commands:
        done = run(*arguments.split())
        assert done.returncode == 0, (arguments, done.stderr)


def test_the_bare_command_shows_its_help():
    assert succeed() == succeed("--help")
    done = run("")
    assert (done.returncode, done.stdout) == (2, "")
    assert "command: got '', expected one of doctor, explain, window, check, bench" in done.stderr


def test_doctor_tells_of_the_machine_the_backends_and_python():
    text = succeed("doctor")
    assert f"{len(os.sched_getaffinity(0))} usable cores" in text
    lines = {line.split()[0]: line.split(None, 1)[1] for line in text.splitlines() if len(line.split()) > 1}
    assert lines["cpu"] and lines["reference"] == "built"
    assert re.search(r"^  cpu +built$", text, re.MULTILINE)
    assert re.search(r"^  cuda_sm90 +(built|not in this build)$", text, re.MULTILINE)
    import torch

    assert lines["torch"] == torch.__version__
    assert sys.executable in lines["python"] or Path(lines["python"].split(" at ")[1]).exists()
    assert text.rstrip().endswith("nothing") or "\nmissing\n" in text


def test_doctor_without_any_python(tmp_path):
    """A copy outside a Python environment, with an empty PATH: says so and how to get one."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "lib").symlink_to(PROGRAM.parent.parent / "lib")
    (tree / "bin" / "plait").write_bytes(PROGRAM.read_bytes())
    (tree / "bin" / "plait").chmod(0o755)
    done = subprocess.run(
        [tree / "bin" / "plait", "doctor"], capture_output=True, text=True, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    assert "python3 was not found: install Python 3.10 or newer" in done.stdout


def test_window_of_the_paper_sizes():
    rows = json.loads(succeed("window", "--P", 4, "--json", 8192, 16384, 32768, 65536))
    assert [row["left"] for row in rows] == [1023, 2049, 4225, 8577]
    assert [row["formula_left"] for row in rows] == [1023, 2047, 4095, 8191]
    assert all(row["visits"] >= row["causal_visits"] for row in rows)
    interleaved = json.loads(succeed("window", "--P", 4, "--mode", "interleaved", "--json", 8192, 16384, 32768, 65536))
    assert [row["left"] for row in interleaved] == [1023, 2047, 4095, 8193]


def test_window_counts_tiles_as_a_brute_force_does():
    """Visits recounted row by row from the definition of a causal window."""
    (row,) = json.loads(succeed("window", "--P", 2, "--tile", 64, "--json", 1000))
    length, tile, passes = 1024, 64, 2  # 1000 rounded up to tiles

    def visits(left):
        seen = set()
        for query in range(length):
            low = 0 if left < 0 else max(0, query - left)
            seen.update((query // tile, key // tile) for key in {low, query, *range(low, query, tile)})
        return len(seen)

    assert row["causal_visits"] == visits(-1)
    assert row["visits"] == passes * visits(row["left"])
    assert row["visit_ratio"] == pytest.approx(row["visits"] / row["causal_visits"])


def test_window_table_has_a_line_for_each_length():
    lines = succeed("window", 4096, 8192).splitlines()
    assert len(lines) == 3 and lines[1].split()[0] == "4096" and lines[2].split()[:3] == ["8192", "1023", "1023"]


def test_explain_names_backend_strategy_and_reasons():
    text = succeed(*words("explain --seqlen-q 4096 --causal --backward"))
    assert "q [1, 8, 4096, 64]" in text
    assert "attention_forward on cpu" in text and "attention_backward on cpu" in text
    assert "because" in text and "workspace" in text


def test_explain_strategies_differ():
    plans = {
        name: succeed(*words(f"explain --seqlen-q 256 --seqlen-kv 4096 --strategy {name}"))
        for name in ("split_q", "split_kv")
    }
    assert plans["split_q"] != plans["split_kv"]
    for name, text in plans.items():
        assert f"strategy   {name}" in text


# Decode reads few columns fast, but goes through all keys once for each of 128 row tiles.
@pytest.mark.parametrize("head_dim", [8, 16, 64])
def test_explain_keeps_long_prefills_from_decode(head_dim):
    options = "--device h200 --dtype bfloat16 --seqlen-q 4096 --heads 8 --causal --head-dim"
    assert re.search(r"backend +cuda_sm90", succeed(*words(f"explain {options} {head_dim}")))


def test_explain_takes_every_option():
    text = succeed(
        *words(
            "explain --batch 2 --heads 8 --kv-heads 2 --seqlen-q 128 --seqlen-kv 256 --head-dim 64 --head-dim-v 32"
            " --dtype bfloat16 --out-dtype float32 --layout bshd --mode interleaved --P 2 --mask token --causal"
            " --window 31 0 --scale 0.5 --softcap 10 --sinks --deterministic --backend cpu --strategy split_kv"
            " --split-size 64 --threads 1 --device cpu"
        )
    )
    for part in (
        "q [2, 128, 8, 2, 64]",
        "v [2, 256, 2, 2, 32]",
        "bfloat16",
        "window (31, 0)",
        "token mask",
        "softcap 10",
        "sinks",
    ):
        assert part in text
    assert "workers    1" in text


def test_explain_of_an_empty_problem_speaks_of_no_parallel_work():
    for options in ("--seqlen-q 0", "--seqlen-kv 0", "--batch 0"):
        assert "no query row or no key" in succeed("explain", *words(options))


def test_explain_packed_is_packed():
    assert "q [384, 8, 64]" in succeed(*words("explain --packed --batch 3 --seqlen-q 128"))


CHECKS = [
    "--causal",
    "--dtype bfloat16 --kv-heads 2 --window 20 7",
    "--dtype float16 --head-dim 80 --head-dim-v 48 --softcap 20 --sinks --peaky",
    "--mode joint --P 3 --causal --window 63 -1 --layout bshd",
    "--mode interleaved --P 2 --causal --mask token --kv-heads 1 --dtype bfloat16",
    "--packed --seqlen-q 130 --seqlen-kv 64 --causal",
    "--strategy split_kv --seqlen-q 3 --seqlen-kv 1000",
    "--seqlen-kv 0 --sinks",
    "--batch 0",
]


@pytest.mark.parametrize("options", CHECKS)
def test_check_passes(options):
    report = json.loads(succeed("check", "--json", "--seed", 11, *words(options)))
    assert report["passed"] and report["repeats"] and report["backend"] == "cpu"
    names = [row["output"] for row in report["outputs"]]
    assert names == ["out", "lse", "dq", "dk", "dv"] + (["dsinks"] if "--sinks" in options else [])
    assert all(row["passed"] for row in report["outputs"])


@pytest.mark.parametrize("shape", ["--seqlen-q 64 --seqlen-kv 2", "--seqlen-q 64 --seqlen-kv 7", "--head-dim 1"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_problems_are_held_to_the_error_of_eager_attention(shape, dtype):
    for seed in (1, 2, 3):
        assert json.loads(succeed(*words(f"check --json --peaky --dtype {dtype} --seed {seed} {shape}")))["passed"]
    done = run(*words(f"check --json --peaky --dtype {dtype} --seed 1 --bar-factor 0.05 {shape}"))
    assert not json.loads(done.stdout)["passed"]


def test_larger_problems_keep_the_published_bars():
    report = json.loads(succeed(*words("check --json --peaky --causal --dtype float16 --seqlen-q 64 --seed 1")))
    bars = {row["output"]: row.get("rms_bar") for row in report["outputs"]}
    assert (bars["out"], bars["dq"], bars["dk"], bars["dv"]) == (3.25e-4, 4.75e-4, 4.75e-4, 3.25e-4)


def test_check_measures_real_errors():
    """bfloat16 errors are above float32's, and neither is zero: the comparison is with another computation."""
    errors = {}
    for dtype in ("float32", "float16", "bfloat16"):
        report = json.loads(succeed(*words(f"check --json --seed 3 --causal --dtype {dtype}")))
        errors[dtype] = {row["output"]: row["rms"] for row in report["outputs"]}
    for name in ("out", "dq", "dk", "dv"):
        assert 0 < 20 * errors["float32"][name] < errors["float16"][name] < errors["bfloat16"][name] / 4


def test_check_draws_fresh_numbers_and_repeats_a_seed():
    first, second = succeed("check", "--seqlen-q", 9), succeed("check", "--seqlen-q", 9)
    assert first != second
    seed = re.search(r"seed (\d+)", first).group(1)
    assert succeed("check", "--seqlen-q", 9, "--seed", seed) == first


def test_check_fails_with_exit_code_1_where_a_bar_is_missed():
    done = run(*words("check --causal --bar-factor 0.01 --seed 5"))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("FAILED") >= 5 and done.stdout.endswith("check FAILED\n")
    report = json.loads(run(*words("check --causal --bar-factor 0.01 --seed 5 --json")).stdout)
    assert not report["passed"] and report["repeats"] and not any(row["passed"] for row in report["outputs"])


def test_bench_prints_times():
    report = json.loads(succeed(*words("bench --json --seqlen-q 256 --causal --repeats 3 --warmup 1")))
    assert [row["op"] for row in report["timings"]] == ["attention_forward", "attention_backward"]
    pairs = 8 * 256 * 257 / 2
    for row, flops in zip(report["timings"], (4 * 64 * pairs, 10 * 64 * pairs), strict=True):
        assert 0 < row["best_ms"] <= row["median_ms"]
        assert row["tflops"] == pytest.approx(flops / row["median_ms"] / 1e9, rel=1e-6)
    text = succeed(*words("bench --seqlen-q 64 --repeats 1 --forward-only"))
    assert "attention_forward" in text and "attention_backward" not in text and "TFLOP/s" in text


REFUSALS = {
    "frobnicate": "command: got 'frobnicate'",
    "--nope": "--nope",
    "--": "command: got none",
    "explain extra": "extra",
    "explain --nope": "--nope",
    "explain --backend gpu": "backend: got 'gpu'",
    "explain --backend cuda_sm90": "cuda_sm90 cannot serve this call",
    "explain --backend cuda_mma": "missing: cpu tensors, float32. way out: move the tensors to a GPU",
    "explain --device h200 --dtype float64": "missing: float64",
    "explain --device toaster": "device: got 'toaster'",
    "check --device cuda:-1": "device: got 'cuda:-1'",
    "explain --batch -1": "--batch: got '-1'",
    "explain --batch 1e3": "--batch: got '1e3'",
    "explain --batch 010x": "--batch: got '010x'",
    "explain --batch 99999999999999999999": "--batch: got '99999999999999999999'",
    "explain --batch 1099511627776 --heads 1099511627776": "shape:",
    "explain --kv-heads 3": "--kv-heads: got 3 for 8 query heads, expected a divisor of 8",
    "explain --window 5": "--window",
    "explain --window -2 0": "--window: got '-2'",
    "explain --strategy split_x": "strategy: got 'split_x'",
    "explain --strategy split_d": "missing: strategy split_d",
    "explain --scale nan": "--scale: got nan",
    "explain --scale inf": "--scale: got inf",
    "explain --scale x": "--scale: got 'x'",
    "explain --softcap -1": "error: --softcap: got -1",
    "explain --P 4": "--P: got 4 in plain mode",
    "explain --P 0 --mode joint": "--P: got '0'",
    "explain --mode sideways": "--mode: got 'sideways'",
    "explain --dtype int8": "--dtype: got 'int8'",
    "explain --out-dtype float16": "--out-dtype: got float16",
    "explain --head-dim 2000": "--head-dim: got '2000', expected a whole number from 1 to 1024 (see plait",
    "explain --head-dim-v 0": "--head-dim-v: got '0'",
    "explain --mask token": "--mask: got 'token'",
    "window": "N is required",
    "window 0": "N: got '0'",
    "window -5": "N: got '-5'",
    "window --P 0 100": "--P: got '0'",
    "window --P 60 100": "--P: got 60 with N = 100, expected 2P <= N",
    "window 4 8": "--P: got 4 (the default) with N = 4, expected 2P <= N",
    "window --mode plain 100": "--mode: got 'plain'",
    "window 99999999999": "N: got '99999999999', expected a whole number from 1 to 4294967296",
    "window 9999999999999": "N: got '9999999999999', expected a whole number from 1 to 4294967296",
    "window 8192 --tile 9999999999999": "--tile: got '9999999999999', expected a whole number from 1 to 4294967296",
    "check --backend reference": "oracle itself",
    "check --dtype float64": "oracle itself",
    "check --seqlen-q 100000000": "use smaller sizes",
    "check --bar-factor nan": "--bar-factor: got nan",
    "check --seed -1": "--seed: got '-1'",
    "bench --seqlen-q 100000000 --head-dim 1024": "use smaller sizes",
    "bench --repeats 0": "--repeats: got '0'",
    "bench --threads 5000": "--threads: got '5000'",
    "bench --kv-heads 3": "--kv-heads: got 3 for 8 query heads, expected a divisor of 8",
    "bench --seqlen 100": "did you mean --seqlen-q, --seqlen-kv? (see plait bench --help)",
    "explain --head_dim=64": "did you mean --head-dim",
}


@pytest.mark.parametrize("command", REFUSALS)
def test_refusals_are_one_line_and_exit_code_2(command):
    done = run(*words(command))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("plait: error: ") and done.stderr.count("\n") == 1
    assert REFUSALS[command] in done.stderr
