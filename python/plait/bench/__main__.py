"""Command line of the benchmarks.

Called as `python -m plait.bench`; exit status 0 done, 1 a loss bar missed, 2 settings that cannot run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXAMPLES = """examples:
  python -m plait.bench llama                             the tiny preset on the best device, under 3 minutes
  python -m plait.bench llama --preset 2.4b --device cuda --N 16384 --iha-frac 0.8 --P 4
  python -m plait.bench llama --P 2 --iha-layers 0,3 --wsl 127 --text book.txt --out results
  python -m plait.bench sweep --P 1,2,4,8 --iha-frac 0.25,0.5,0.8 --N 256,512
  python -m plait.bench cpu --json cpu.json               attention beside torch's SDPA on this CPU
"""

EXIT_BAD_SETTINGS = 2


def main(arguments: list[str] | None = None) -> int:
    """Parses, checks, and runs one benchmark."""
    options = _parser().parse_args(arguments)
    try:
        # Imported here, so that --help answers at once and a missing package gets a sentence instead of a traceback.
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"plait.bench: {error}; install it: pip install 'plait[bench]'", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    from plait.bench.config import BenchError

    try:
        return {"llama": _llama, "sweep": _sweep, "cpu": _cpu}[options.command](options)
    except BenchError as error:
        print(f"plait.bench {options.command}: error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except KeyboardInterrupt:
        print("plait.bench: interrupted", file=sys.stderr)
        return 130


def _llama(options: argparse.Namespace) -> int:
    from plait.bench import llama
    from plait.bench.config import PRESETS, BenchError, build_config, prepare_folder

    if options.iha_frac is not None and options.iha_layers not in (None, "even", "first"):
        raise BenchError(f"--iha-frac: got {options.iha_frac} beside --iha-layers {options.iha_layers}; give one")
    config = build_config(options.preset, vars(options))
    device = _device(options, config)
    folder = prepare_folder(options.out)
    return llama.run(config, device, options.text, folder, PRESETS[options.preset].train_steps)


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
    device = _device(options, max(configs, key=lambda config: config.N))
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


def _device(options: argparse.Namespace, config):
    import torch

    from plait.bench.models import check_memory, pick_device

    device = pick_device(options.device, getattr(torch, config.dtype))
    check_memory(config, device)
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plait.bench",
        description="Benchmarks of plait: attention and Interleaved Head Attention (IHA) in a LLaMA.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="llama | sweep | cpu")
    llama = commands.add_parser(
        "llama",
        help="time SDPA, plait and IHA in one LLaMA, then train on real text",
        description="Times three models of one config: SDPA, plait attention in every layer, and IHA in a share of the "
        "layers with plait attention in the rest. Then trains the last two and follows their held-out loss.",
    )
    _model_options(llama)
    _add(llama, "--P", int, "pseudo-heads per head")
    _add(llama, "--N", int, "tokens per sequence")
    _add(llama, "--iha-frac", float, "share of the layers that become IHA, 0 to 1")
    _add(llama, "--train-steps", int, "steps of the training after the timing; 0 skips it")
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
        description="Forward and backward of causal attention, batch 1, 8 heads, beside SDPA and a matrix product.",
    )
    _add(cpu, "--json", str, "result file", default="plait-bench/cpu.json")
    _add(cpu, "--seqlen", _list_of(int), "lengths, comma-separated", default=[2048, 8192])
    _add(cpu, "--head-dim", _list_of(int), "head dims, comma-separated", default=[64, 128])
    _add(
        cpu, "--dtype", _list_of(_dtype), "float32, bfloat16, float16, comma-separated", default=["float32", "bfloat16"]
    )
    _add(cpu, "--samples", int, "samples of each function, taken in turns", default=7)
    return parser


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
    _add(parser, "--n-iter", int, "timed calls of each kind")
    _add(parser, "--dtype", _dtype, "float32, bfloat16 or float16")
    _add(parser, "--lr", float, "peak learning rate")
    _add(parser, "--seed", int, "seed of weights and batches")
    _add(parser, "--text", str, "text to train on, any file (default: the Python standard library's sources)")
    _add(parser, "--out", str, "folder for the JSON and the plot", default="plait-bench")


def _add(parser: argparse.ArgumentParser, name: str, kind, text: str, default=None) -> None:
    """An option under its name and, where it has two words, with underscores too."""
    spellings = [name]
    if "-" in name[2:]:
        spellings.append("--" + name[2:].replace("-", "_"))
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
