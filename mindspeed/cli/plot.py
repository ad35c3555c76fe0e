"""``mindspeed plot``: plot loss, gradient norm, throughput and memory of one or more runs.

    mindspeed plot runs/a                      writes runs/a/loss.png
    mindspeed plot runs/a runs/b               compares runs: writes runs/a/compare.png
    mindspeed plot runs/a runs/b -o ab.svg     .png, .svg and .pdf work

A run is a directory with ``metrics.jsonl``, or such a file. Values are drawn as thin lines, their
moving average as a thick line, validation losses as points. With several runs the first is the
reference: the relative errors of the other losses are plotted and printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed.cli.metrics import (
    LOSS,
    METRICS_FILE,
    VALIDATION_LOSS,
    Run,
    metrics_file,
    read_runs,
    relative_errors,
)
from mindspeed.cli.training_plot import draw
from mindspeed.ranges import NOT_NEGATIVE, number

HELP = "plot loss, gradient norm, throughput and memory of one or more runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"with {METRICS_FILE}")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="image to write (default: loss.png or, for several runs, compare.png next to the "
        "first metrics file)",
    )
    parser.add_argument("--title", help="title of the plot")
    parser.add_argument(
        "--smooth",
        type=number(NOT_NEGATIVE),
        metavar="POINTS",
        help="half width of the moving average (default: a hundredth of the curve)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the plot and print a summary."""
    files = [metrics_file(path) for path in args.runs]
    output = args.output or files[0].with_name("loss.png" if len(files) == 1 else "compare.png")
    runs = read_runs(files)
    draw(runs, output, title=args.title, smooth=args.smooth)
    for line in [*map(_describe, runs), *_compare(runs)]:
        print(line)
    print(f"wrote {output}")
    return 0


def _describe(run_: Run) -> str:
    """First and last losses of a run, and the number of unreadable lines."""
    loss = run_.curve(LOSS)
    values = list(loss.values())
    parts = [f"{run_.name}: loss {values[0]:.3f} -> {values[-1]:.3f} at iteration {max(loss)}"]
    validation = list(run_.curve(VALIDATION_LOSS).values())
    if validation:
        parts.append(f"validation {validation[-1]:.3f}")
    if run_.unreadable_lines:
        parts.append(f"{run_.unreadable_lines} unreadable lines were skipped")
    return ", ".join(parts)


def _compare(runs: Sequence[Run]) -> Iterator[str]:
    for run_ in runs[1:]:
        errors = relative_errors(runs[0], run_)
        if not errors:
            yield f"{run_.name}: no iteration in common with {runs[0].name}"
            continue
        sizes = {iteration: abs(error) for iteration, error in errors.items()}
        worst = max(sizes, key=lambda iteration: sizes[iteration])
        yield (
            f"{run_.name} against {runs[0].name}: relative error of the loss "
            f"{sum(sizes.values()) / len(sizes):.3%} on average over {len(sizes)} iterations, "
            f"at most {sizes[worst]:.3%} at iteration {worst}"
        )
