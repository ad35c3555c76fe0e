"""Compare recordings of trainings with other layouts, devices or flags: where do two runs part?

    mindspeed pretrain FLAGS --record runs/a     # or any Megatron script with our import line
    mindspeed pretrain FLAGS --record runs/b --tensor-model-parallel-size 2
    mindspeed compare runs/a runs/b
    mindspeed compare --bisect runs -- mindspeed pretrain FLAGS -- mindspeed pretrain OTHERS

Names the first tensor of B that differs from A's by more than rounding explains, and what enters
it. What rounding explains is measured where runs/a/noise-1 ... exist, recordings of the same run
with --record-noise 1 ...; else it is estimated. The exit status is 1 if a tensor differs.

``--plot`` draws the relative error by layer and kind of tensor, one panel a step.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.plot import GREY, check_format, figure_class, write_figure
from mindspeed.compare.names import layer_of
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text

if TYPE_CHECKING:
    from mindspeed.compare.verdicts import ComparedTensor
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


_LEAST, _MOST = -8.0, 0.0  # decimal exponents of the colours


def draw(path: Path, result: Result) -> None:
    """Write the picture as PNG, SVG or PDF.

    Rows are kinds of tensors in the order of the step, columns layers; a frame marks what differs
    by more than rounding explains.

    Raises:
        ConfigError: matplotlib is missing, or the file has another ending.
    """
    check_format("--plot", path)
    steps = sorted({row.name.step for row in result.rows})
    kinds = list(dict.fromkeys(_kind(row) for row in result.rows))
    columns = list(dict.fromkeys(_column(row) for row in result.rows))
    columns.sort(key=lambda one: (one.isdigit(), int(one) if one.isdigit() else 0))
    figure = figure_class()(
        figsize=(4 + 0.35 * len(columns) * len(steps), 1.5 + 0.16 * len(kinds)),
        layout="constrained",
    )
    panels = figure.subplots(1, len(steps), squeeze=False)[0]
    for panel, step in zip(panels, steps, strict=True):
        rows = [row for row in result.rows if row.name.step == step]
        image = _panel(panel, rows, kinds, columns)
        panel.set_title(f"step {step}", loc="left", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="relative error, power of ten", shrink=0.6)
    write_figure(figure, path)


def _panel(panel: Any, rows: list[ComparedTensor], kinds: list[str], columns: list[str]) -> Any:
    values = [[math.nan] * len(columns) for _ in kinds]
    marked = set()
    for row in rows:
        at = kinds.index(_kind(row)), columns.index(_column(row))
        error = row.difference.error
        power = _LEAST if error == 0 else math.log10(min(error, 1.0)) if error < math.inf else _MOST
        known = values[at[0]][at[1]]
        values[at[0]][at[1]] = power if math.isnan(known) else max(known, power)
        if row.difference.differs:
            marked.add(at)
    image = panel.imshow(values, cmap="viridis", vmin=_LEAST, vmax=_MOST, aspect="auto")
    for y, x in marked:
        left, right, low, high = x - 0.45, x + 0.45, y - 0.45, y + 0.45
        frame = (left, right, right, left, left), (low, low, high, high, low)
        panel.plot(*frame, color="red", linewidth=0.8)
    panel.set_xticks(range(len(columns)), columns, rotation=90, fontsize=6)
    panel.set_yticks(range(len(kinds)), kinds, fontsize=5)
    panel.tick_params(color=GREY)
    return image


def _kind(row: ComparedTensor) -> str:
    name = row.name
    module = name.module
    if layer_of(module) is not None:
        module = ".".join(module.split(".")[3:]) or "layer"
    return f"{name.when} {module} {name.what}"


def _column(row: ComparedTensor) -> str:
    layer = layer_of(row.name.module)
    return "other" if layer is None else str(layer)
