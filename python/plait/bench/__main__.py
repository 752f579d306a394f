"""Command line of the benchmarks.

Called as `python -m plait.bench`; exit status 0 done, 1 a loss bar missed or nothing measured, 2 settings that cannot
run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

EXAMPLES = """examples:
  python -m plait.bench llama                             the tiny preset on the best device, under 3 minutes
  python -m plait.bench llama --preset 2.4b --device cuda --N 16384 --budget 60
  python -m plait.bench llama --P 2 --iha-layers 0,3 --wsl 127 --text book.txt --out results
  python -m plait.bench sweep --P 1,2,4,8 --iha-frac 0.25,0.5,0.8 --N 256,512
  python -m plait.bench cpu --json cpu.json               attention beside torch's SDPA on this CPU
  python -m plait.bench prefill --budget 80               a kernel suite beside torch's kernels; also backward, iha,
                                                          decode, large_head_dim, matrix, crossover
  python -m plait.bench backward --cases "D128 causal" --backends cuda_mma,cuda_naive --regime burst
  python -m plait.bench plots && python -m plait.bench tables --readme README.md
"""

EXIT_BAD_SETTINGS = 2
SUITES = ("prefill", "backward", "iha", "decode", "large_head_dim", "matrix", "crossover")
_PACKAGES = {"llama": ("matplotlib", "rich", "transformers"), "plots": ("matplotlib", "rich"), "tables": ("rich",)}
_PACKAGES["sweep"] = _PACKAGES["llama"]


def main(arguments: list[str] | None = None) -> int:
    """Parses, checks, and runs one benchmark."""
    options = _parser().parse_args(arguments)
    try:
        # Imported here, so that --help answers at once and a missing package gets a sentence instead of a traceback.
        for package in _PACKAGES.get(options.command, ("rich",)):
            importlib.import_module(package)
    except ImportError as error:
        print(f"plait.bench: {error}; install it: pip install 'plait[bench]'", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    from plait.bench.config import BenchError

    commands = {"llama": _llama, "sweep": _sweep, "cpu": _cpu, "tables": _tables, "plots": _plots}
    try:
        return commands.get(options.command, _kernels)(options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if options.command not in ("tables", "plots"):
            raise
        # Rows of another version of a suite, or of something else.
        print(
            f"plait.bench {options.command}: error: a result file has another form than this benchmark's ({error!r}); "
            "measure its suite again",
            file=sys.stderr,
        )
        return EXIT_BAD_SETTINGS
    except BenchError as error:
        print(f"plait.bench {options.command}: error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except KeyboardInterrupt:
        print("plait.bench: interrupted", file=sys.stderr)
        return 130


def _llama(options: argparse.Namespace) -> int:
    from plait.bench import llama
    from plait.bench.config import FRACTIONS, PRESETS, BenchError, build_config, prepare_folder

    if options.iha_frac is not None and options.iha_layers not in (None, "even", "first"):
        raise BenchError(f"--iha-frac: got {options.iha_frac} beside --iha-layers {options.iha_layers}; give one")
    fractions = options.iha_frac or FRACTIONS.get(options.preset, [None])
    if options.iha_layers not in (None, "even", "first"):
        fractions = [None]
    configs = [build_config(options.preset, {**vars(options), "iha_frac": fraction}) for fraction in fractions]
    device = _model_device(options, configs[0])
    job = llama.Job(
        device,
        options.text,
        prepare_folder(options.out),
        PRESETS[options.preset].train_steps,
        json=_result_path(options.json) if options.json else None,
        budget_s=_budget(options.budget),
        commit=options.commit,
    )
    return llama.run(configs, job)


def _sweep(options: argparse.Namespace) -> int:
    from plait.bench import sweep
    from plait.bench.config import build_config, prepare_folder

    base = vars(options)
    configs = [
        build_config(options.preset, {**base, "P": p, "iha_frac": frac, "N": n})
        for n in options.N or [None]
        for p in options.P
        for frac in options.iha_frac
    ]
    device = _model_device(options, max(configs, key=lambda config: config.N))
    return sweep.run(configs, device, options.text, prepare_folder(options.out))


def _cpu(options: argparse.Namespace) -> int:
    from plait.bench import cpu
    from plait.bench.config import BenchError, prepare_folder

    for name, values in (
        ("--seqlen", options.seqlen),
        ("--head-dim", options.head_dim),
        ("--samples", [options.samples]),
    ):
        if min(values) < 1:
            raise BenchError(f"{name}: got {min(values)}, expected at least 1")
    path = Path(options.json)
    prepare_folder(str(path.parent))
    return cpu.run(cpu.shapes(options.seqlen, options.head_dim, options.dtype), options.samples, path)


def _kernels(options: argparse.Namespace) -> int:
    import torch

    from plait.bench import kernels, results
    from plait.bench.devices import pick_device
    from plait.bench.suites import REGIMES

    device = pick_device(options.device, torch.bfloat16)
    settings = kernels.Settings(
        suite=options.command,
        device=device,
        path=_result_path(options.json or str(results.default_path(device, options.command))),
        budget_s=_budget(options.budget),
        patterns=options.cases or [],
        backends=options.backends,
        regimes=REGIMES if options.regime == "both" else (options.regime,),
        commit=options.commit,
        peers=options.peers,
    )
    return kernels.list_cases(settings) if options.list else kernels.run(settings)


def _tables(options: argparse.Namespace) -> int:
    from plait.bench import tables

    return tables.run(Path(options.results), Path(options.readme))


def _plots(options: argparse.Namespace) -> int:
    from plait.bench import plots

    return plots.run(Path(options.results), Path(options.out))


def _model_device(options: argparse.Namespace, config):
    import torch

    from plait.bench.devices import check_memory, pick_device

    device = pick_device(options.device, getattr(torch, config.dtype))
    check_memory(config, device)
    return device


def _result_path(text: str) -> Path:
    from plait.bench.config import prepare_folder

    path = Path(text)
    prepare_folder(str(path.parent), "--json")
    return path


def _budget(seconds: float) -> float:
    from plait.bench.config import BenchError

    if not seconds > 0:
        raise BenchError(f"--budget: got {seconds}, expected a positive number of seconds")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plait.bench",
        description="Benchmarks of plait: kernels beside torch's, and attention and Interleaved Head Attention (IHA) "
        "in a LLaMA.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    llama = commands.add_parser(
        "llama",
        help="time SDPA, plait and IHA in one LLaMA, then train on real text",
        description="Times models of one config: SDPA, plait attention in every layer, and IHA in shares of the "
        "layers with plait attention in the rest. Then trains plait and the first share and follows their held-out "
        "loss.",
    )
    _model_options(llama)
    _add(llama, "--P", int, "pseudo-heads per head")
    _add(llama, "--N", int, "tokens per sequence")
    _add(llama, "--iha-frac", _list_of(float), "shares of the layers that become IHA, 0 to 1, comma-separated")
    _add(llama, "--train-steps", int, "steps of the training after the timing; 0 skips it")
    _add(llama, "--json", str, "result file of the suite llama to add the rows to")
    _add(llama, "--budget", float, "seconds for the timing; after it nothing more is started", default=float("inf"))
    _add(llama, "--commit", str, "what the result file names as commit, outside a checkout")
    sweep = commands.add_parser(
        "sweep",
        help="time IHA over P, share of layers and length",
        description="Times every combination of the comma-separated lists, beside SDPA and plait.",
    )
    _model_options(sweep)
    _add(sweep, "--P", _list_of(int), "pseudo-heads per head, comma-separated", default=[1, 2, 4, 8])
    _add(sweep, "--N", _list_of(int), "tokens per sequence, comma-separated")
    _add(sweep, "--iha-frac", _list_of(float), "shares of the layers, comma-separated", default=[0.25, 0.5, 0.8])
    cpu = commands.add_parser(
        "cpu",
        help="attention beside torch's SDPA on this CPU",
        description="Forward and backward of causal attention, batch 1, 8 heads, beside SDPA and a matrix product; and "
        "what packed sequences, a softcap and sinks cost per visited tile of the smallest shape. Adds to the file.",
    )
    _add(cpu, "--json", str, "result file", default="plait-bench/cpu.json")
    _add(cpu, "--seqlen", _list_of(int), "lengths, comma-separated", default=[2048, 8192])
    _add(cpu, "--head-dim", _list_of(int), "head dims, comma-separated", default=[64, 128])
    _add(
        cpu, "--dtype", _list_of(_dtype), "float32, bfloat16, float16, comma-separated", default=["float32", "bfloat16"]
    )
    _add(cpu, "--samples", int, "samples of each function, taken in turns", default=7)
    _kernel_options(commands)
    tables = commands.add_parser("tables", help="write the benchmark tables of the README from result files")
    _add(tables, "--results", str, "folder of one GPU's result files", default="bench/results/h200")
    _add(tables, "--readme", str, "file whose part between the benchmark markers is replaced", default="README.md")
    plots = commands.add_parser("plots", help="draw the result files")
    _add(plots, "--results", str, "folder of result folders, one per GPU", default="bench/results")
    _add(plots, "--out", str, "folder for the plots", default="bench/plots")
    return parser


def _kernel_options(commands) -> None:
    for name in SUITES:
        suite = commands.add_parser(
            name,
            help=f"the kernel suite {name} beside torch's kernels",
            description="Measures plait beside torch's kernels and a matrix product or copy, all interleaved in one "
            "run, and adds a row per case to the result file. The most important cases come first; what the budget "
            "leaves out is said.",
        )
        _add(suite, "--json", str, "result file (default: bench/results/<gpu>/<suite>.json, or under plait-bench)")
        _add(suite, "--budget", float, "seconds in all", default=120.0)
        _add(suite, "--cases", _list_of(str), "comma-separated: words that a case must have, or a whole new case")
        _add(suite, "--backends", _list_of(str), "plait's, comma-separated (default: auto, in some cases also others)")
        _add(suite, "--peers", _list_of(str), "comma-separated, such as gemm,cudnn (default: all that a case has)")
        _add(suite, "--device", str, "auto (default: the best that this build serves), cpu, cuda, cuda:N", "auto")
        _add(suite, "--commit", str, "what the result file names as commit, outside a checkout")
        suite.add_argument(
            "--regime",
            choices=("burst", "sustained", "both"),
            default="both",
            help="burst: samples of a few ms; sustained: a second back to back, of few cases unless --cases names them",
        )
        suite.add_argument("--list", action="store_true", help="print what would be measured, and stop")


def _model_options(parser: argparse.ArgumentParser) -> None:
    _add(parser, "--preset", str, "tiny (default) or 2.4b; the other options change it", default="tiny")
    _add(parser, "--device", str, "auto (default: the best that this build serves), cpu, cuda, cuda:N", default="auto")
    _add(parser, "--hidden", int, "width of the model")
    _add(parser, "--heads", int, "query heads")
    _add(parser, "--kv-heads", int, "key-value heads; as many as --heads when only that is given")
    _add(parser, "--layers", int, "decoder layers")
    _add(parser, "--intermediate", int, "width of the MLP")
    _add(parser, "--vocab", int, "size of the vocabulary, at least 256")
    _add(parser, "--B", int, "sequences per batch")
    _add(
        parser, "--wsl", str, "IHA window: keys to the left, none, or auto (default): FLOP-matched to causal attention"
    )
    _add(parser, "--iha-layers", str, "even (default), first, or layer indices such as 0,3,6")
    _add(parser, "--mode", str, "joint (default) or interleaved")
    _add(parser, "--n-iter", int, "timed calls of each kind, at most")
    _add(parser, "--dtype", _dtype, "float32, bfloat16 or float16")
    _add(parser, "--lr", float, "peak learning rate")
    _add(parser, "--seed", int, "seed of weights and batches")
    _add(parser, "--text", str, "text to train on, any file (default: the Python standard library's sources)")
    _add(parser, "--out", str, "folder for the JSON and the plot", default="plait-bench")


def _add(parser: argparse.ArgumentParser, name: str, kind, text: str, default=None) -> None:
    """An option under its name and, where it has two words, with underscores too; --N also as --n."""
    spellings = [name]
    if "-" in name[2:]:
        spellings.append("--" + name[2:].replace("-", "_"))
    if name == "--N":
        spellings.append("--n")
    metavar = {int: "INT", float: "FLOAT", str: "TEXT"}.get(kind, "LIST" if kind is not _dtype else "DTYPE")
    parser.add_argument(*spellings, type=kind, help=text, default=default, metavar=metavar)


def _dtype(text: str) -> str:
    if text not in ("float32", "bfloat16", "float16"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected float32, bfloat16 or float16")
    return text


def _list_of(kind):
    def parse(text: str) -> list:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            name = kind.__name__
            raise argparse.ArgumentTypeError(f"got {text!r}, expected comma-separated values ({name})") from None

    return parse


if __name__ == "__main__":
    sys.exit(main())
