"""Compare recordings of trainings with other layouts, devices or flags: where do two runs part?

    mindspeed pretrain FLAGS --record runs/a     # or any Megatron script with our import line
    mindspeed pretrain FLAGS --record runs/b --tensor-model-parallel-size 2
    mindspeed compare runs/a runs/b
    mindspeed compare --bisect runs -- mindspeed pretrain FLAGS -- mindspeed pretrain OTHERS

Names the first tensor of B that differs from A's by more than rounding explains, and what enters
it. What rounding explains is measured where runs/a/noise-1 ... exist, recordings of the same run
with --record-noise 1 ...; else it is estimated. The exit status is 1 if a tensor differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text

if TYPE_CHECKING:
    from mindspeed.compare.walk import Result

HELP = "find the first tensor in which two recorded trainings differ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="DIR", help="A, the trusted run, and B")
    add(
        "--noise",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="recordings of A with --record-noise (default: noise-* in A; forced-noise-* where B "
        "is recorded with --record-forced)",
    )
    add(
        "--against",
        metavar="hf:DIR",
        help="B is transformers' model of DIR, run on A's tokens (written to A/hf)",
    )
    add("--demo", action="store_true", help="plant a fault in a small job and find it")
    add(
        "--bisect",
        type=Path,
        metavar="DIR",
        help="run the commands of A and B (after --, each), record into DIR, and find the flags",
    )
    add(
        "--replay",
        type=Path,
        metavar="DIR",
        help="write the module that differs first, to be called again without the job",
    )
    add("--plot", type=Path, metavar="FILE", help="draw the error by layer: PNG, SVG or PDF")
    add("--json", type=Path, metavar="FILE", help="write all tensors as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare two recordings; print the page."""
    if args.demo:
        return _demo()
    if args.bisect:
        result, lines = _bisect(args.bisect, args.flags)
    elif args.against and len(args.runs) == 1:
        [a] = args.runs
        result, lines = _compare(a, _recorded_by_transformers(a, args.against), args.noise)
    elif len(args.runs) == 2 and not args.flags:
        a, b = args.runs
        result, lines = _compare(a, b, args.noise)
    else:
        raise ConfigError("give two recordings: mindspeed compare A B (or see it with --demo)")
    if args.json:
        from mindspeed.compare import page

        atomic_write_text(args.json, json.dumps(page.as_data(result), indent=1) + "\n")
    if args.plot:
        from mindspeed.cli.compare_plot import draw

        draw(args.plot, result)
    if args.replay and result.first is not None:
        lines += ["", _replay(args, result)]
    print("\n".join(lines))
    return 0 if result.equal else 1


def _replay(args: argparse.Namespace, result: Result) -> str:
    """Write the module whose operators were compared, and say how to call it."""
    from mindspeed.compare import megatron_replay

    found = result.operator
    if found is None or found.call.module == "model":
        raise ConfigError(
            f"--replay: record both runs with --record-level full --record-operators MODULE, where "
            f"{result.first and result.first.name} differs first, or give --bisect"
        )
    a, b = (args.bisect / f"operators-{run}" for run in "ab") if args.bisect else args.runs
    rank = found.ranks[0] if found.ranks else 0
    return megatron_replay.write(a, b, found.call.step, found.call.module, args.replay, rank)


def _recorded_by_transformers(a: Path, against: str) -> Path:
    """The recording of another implementation on A's tokens."""
    from mindspeed.compare.recording import read
    from mindspeed.models.hf_recording import record

    kind, _, folder = against.partition(":")
    if kind != "hf" or not Path(folder).is_dir():
        raise ConfigError(
            f"--against {against}: give hf:DIR, a directory with config.json and weights"
        )
    record(read(a), Path(folder), a / "hf")
    return a / "hf"


def _compare(a: Path, b: Path, noise: list[Path] | None = None) -> tuple[Result, list[str]]:
    """The comparison and its page."""
    from mindspeed.compare import operator_walk, page
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare, entering

    here, there = read(a), read(b)
    if noise is None:
        forced = any(scalars.get("forced") for scalars in there.scalars.values())
        noise = sorted(a.glob("forced-noise-*" if forced else "noise-*"))
    result = compare(here, there, [read(path) for path in noise])
    if result.first is not None:
        operators = operator_walk.read(a), operator_walk.read(b)
        runs = [own for path in noise if (own := operator_walk.read(path))]
        result.operator = operator_walk.first_difference(
            *operators, result.first.name, entering(result), runs
        )
    return result, list(page.lines(result, here, there))


def _bisect(folder: Path, words: list[str]) -> tuple[Result, list[str]]:
    """A and B of two commands, and the flags that make the difference."""
    from mindspeed.cli.compare_bisect import Bisection, commands_of
    from mindspeed.compare import page

    result, a, b, flags = Bisection(folder, *commands_of(words)).run()
    lines = ["", *page.lines(result, a, b)]
    if flags:
        lines += ["", "it comes with: " + " ".join(map(str, flags))]
    return result, lines


def _demo() -> int:
    from mindspeed.cli.compare_demo import LAYER, demo

    folder, holder = demo()
    with holder:
        print(f"\nmindspeed compare {folder}/a {folder}/b\n")
        result, lines = _compare(folder / "a", folder / "b")
    print("\n".join(lines))
    first = result.first
    wanted = f"decoder.layers.{LAYER}.self_attention.core_attention"
    found = first is not None and first.name.module == wanted
    print(f"\nthe planted fault was {'found' if found else 'NOT found'}: {wanted}")
    return 0 if found else 1
