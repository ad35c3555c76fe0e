"""``mindspeed plot``: plot loss, gradient norm, throughput and memory of one or more runs.

    mindspeed plot runs/a                      writes runs/a/loss.png
    mindspeed plot runs/a runs/b               compares runs: writes runs/a/compare.png
    mindspeed plot runs/a runs/b -o ab.svg     .png, .svg and .pdf work

A run is a directory with ``metrics.jsonl``, or such a file. Values are drawn as thin lines, their
moving average as a thick line, validation losses as points. With several runs the first is the
reference: the relative errors of the other losses are plotted and printed.
Loss is on top, panels of other metrics below; panels without data are omitted. Drawn without
pyplot: no display, no global state.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.cli.metrics import (
    LOSS,
    METRICS_FILE,
    VALIDATION_LOSS,
    Curve,
    Run,
    metrics_file,
    read_runs,
    relative_errors,
)
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_bytes
from mindspeed.ranges import NOT_NEGATIVE, number

HELP = "plot loss, gradient norm, throughput and memory of one or more runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help=f"with {METRICS_FILE}")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="image to write (default: loss.png or, for several runs, compare.png next to the "
        "first metrics file)",
    )
    add("--title", help="title of the plot")
    add(
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


FORMATS = (".png", ".svg", ".pdf")

# Panel below the loss -> (key in the metrics file, is it noisy).
PANELS: Mapping[str, tuple[str, bool]] = {
    "learning rate": ("learning_rate", False),
    "gradient norm": ("grad_norm", True),
    "tokens/s": ("tokens_per_second", True),
    "memory per device [GB]": ("memory_gb", False),
    "fullest expert / mean": ("expert_load", True),
    "fullest expert rank / mean": ("expert_rank_load", True),
}
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
GREY = "#475569"


def check_format(flag: str, output: Path) -> None:
    """Refuse a file whose ending names no format that can be drawn.

    Raises:
        ConfigError: names the formats.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"{flag} {output}: the file must end in {', '.join(FORMATS)}")


def write_figure(figure: Any, output: Path, dpi: int = 110) -> None:
    """Write a figure of matplotlib in the format of the file's ending, in one step."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=output.suffix[1:], dpi=dpi)
    atomic_write_bytes(output, buffer.getvalue())


def smoothed(values: Sequence[float], reach: float) -> np.ndarray:
    """Gaussian average over about ``reach`` neighbours on each side; gaps (nan, inf) drop out.

    The window is centred, so the curve does not lag behind a falling loss.
    """
    array = np.asarray(values, dtype=float)
    finite = np.isfinite(array)
    half = min(math.ceil(3 * reach), max(len(array) - 1, 0))
    window = np.exp(-0.5 * (np.arange(-half, half + 1) / max(reach, 1e-9)) ** 2)
    total = np.convolve(np.where(finite, array, 0.0), window)[half : half + len(array)]
    weight = np.convolve(finite.astype(float), window)[half : half + len(array)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(weight > 0, total / weight, np.nan)


def draw(
    runs: Sequence[Run], output: Path, *, title: str | None = None, smooth: float | None = None
) -> None:
    """Plot all runs into one figure.

    Args:
        output: File to write; its suffix selects the format.
        title: Title of the figure.
        smooth: Half width of the moving average in points; None for a hundredth of the curve.

    Raises:
        ConfigError: The ending is not known, or matplotlib is not installed.
    """
    check_format("--output", output)
    make = figure_class()
    panels = [name for name, (key, _) in PANELS.items() if any(run.curve(key) for run in runs)]
    errors = [relative_errors(runs[0], run_) for run_ in runs[1:]]
    rows = [2.4, *([0.8] if any(errors) else []), *([1.0] if panels else [])]
    figure = make(figsize=(11, 2.6 + 2.1 * sum(rows) / 1.5), layout="constrained")
    grid = figure.add_gridspec(len(rows), max(len(panels), 1), height_ratios=rows)
    _draw_loss(figure.add_subplot(grid[0, :]), runs, smooth)
    if any(errors):
        _draw_errors(figure.add_subplot(grid[1, :]), runs[0].name, errors)
    for column, name in enumerate(panels):
        _draw_panel(figure.add_subplot(grid[-1, column]), runs, name)
    if title:
        title = title.encode("utf-8", "replace").decode("utf-8")
        figure.suptitle(title, fontsize=14, fontweight="bold", color="#0f172a")
    write_figure(figure, output, dpi=130)


def figure_class() -> Any:
    """Matplotlib's Figure.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'mindspeed[plot]'") from error
    return Figure


def _draw_loss(axes: Any, runs: Sequence[Run], smooth: float | None) -> None:
    several = len(runs) > 1
    for index, run_ in enumerate(runs):
        color = COLORS[index % len(COLORS)]
        prefix = f"{run_.name}: " if several else ""
        _draw_curve(axes, run_.curve(LOSS), color, smooth, label=f"{prefix}training")
        validation = run_.curve(VALIDATION_LOSS)
        if validation:
            values = list(validation.values())
            axes.plot(
                list(validation),
                values,
                color=color if several else COLORS[3],
                marker="o",
                markersize=6,
                markeredgecolor="white",
                linewidth=1.2,
                linestyle=(0, (4, 3)),
                label=f"{prefix}validation {values[-1]:.2f}",
            )
    _decorate(axes, "loss")
    axes.set_xlabel("iteration", color=GREY)
    axes.legend(frameon=False, fontsize=11)


def _draw_errors(axes: Any, reference: str, errors: Sequence[Curve]) -> None:
    """Percent by which the losses of the second, third ... run differ from those of the first."""
    axes.axhline(0, color=GREY, linewidth=0.8)
    for index, curve in enumerate(errors, start=1):
        percent = {iteration: 100 * error for iteration, error in curve.items()}
        if percent:
            _draw_curve(axes, percent, COLORS[index % len(COLORS)], None)
    _decorate(axes, f"loss, difference to {reference} [%]")


def _draw_panel(axes: Any, runs: Sequence[Run], name: str) -> None:
    key, noisy = PANELS[name]
    highest = 0.0
    for index, run_ in enumerate(runs):
        curve = run_.curve(key)
        if curve:
            _draw_curve(axes, curve, COLORS[index % len(COLORS)], None if noisy else 0.0)
            highest = max(highest, *curve.values())
    _decorate(axes, name)
    axes.set_ylim(0, 1.1 * highest or 1.0)
    axes.set_xlabel("iteration", color=GREY, fontsize=9)


def _draw_curve(
    axes: Any, curve: Curve, color: str, smooth: float | None, label: str | None = None
) -> None:
    """Values thin, moving average thick; the label gets the last average."""
    iterations, values = list(curve), list(curve.values())
    average = smoothed(values, max(len(values) / 100, 1.0) if smooth is None else smooth)
    if label is not None:
        label = f"{label} {average[-1]:.2f}"
    axes.plot(iterations, values, color=color, alpha=0.3, linewidth=0.9)
    axes.plot(iterations, average, color=color, linewidth=2.0, label=label)


def _decorate(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=GREY)
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    axes.margins(x=0.02)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#cbd5e1")
