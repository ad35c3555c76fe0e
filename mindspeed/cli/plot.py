"""``mindspeed plot``: plot loss, gradient norm, throughput and memory of one or more runs.

    mindspeed plot runs/a                      writes runs/a/loss.png
    mindspeed plot runs/a runs/b               compares runs: writes runs/a/compare.png
    mindspeed plot runs/a runs/b -o ab.svg     .png, .svg and .pdf work

A run is a directory with ``metrics.jsonl``, or such a file: it may end with an incomplete line if
the run was killed, and may contain an iteration twice after a resume; the later line counts.

Values are drawn as thin lines, their moving average as a thick line, validation losses as points.
With several runs the first is the reference: the relative errors of the other losses are plotted
and printed.
Loss is on top, panels of other metrics below; panels without data are omitted. Drawn without
pyplot: no display, no global state.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_bytes
from mindspeed.parsing import decode_json
from mindspeed.ranges import FINITE, NOT_NEGATIVE, number

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


def _describe(run_: RunCurves) -> str:
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


def _compare(runs: Sequence[RunCurves]) -> Iterator[str]:
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
    runs: Sequence[RunCurves],
    output: Path,
    *,
    title: str | None = None,
    smooth: float | None = None,
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


def _draw_loss(axes: Any, runs: Sequence[RunCurves], smooth: float | None) -> None:
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


def _draw_panel(axes: Any, runs: Sequence[RunCurves], name: str) -> None:
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


METRICS_FILE = "metrics.jsonl"
LOSS, VALIDATION_LOSS = "lm_loss", "validation_loss"
_MOST_ITERATIONS = 2**53  # exact in double precision

Curve = Mapping[int, float]  # iteration -> value


@dataclass(frozen=True)
class RunCurves:
    """The curves of one metrics file by key."""

    name: str
    curves: Mapping[str, Curve]
    unreadable_lines: int = 0

    def curve(self, key: str) -> Curve:
        """The curve of ``key``, empty if it was never recorded."""
        return self.curves.get(key, {})


def metrics_file(path: Path) -> Path:
    """The metrics file of a run.

    Raises:
        DataError: There is none.
    """
    if path.is_file():
        return path
    found = path / METRICS_FILE
    if not found.is_file():
        below = sorted(path.glob(f"*/{METRICS_FILE}")) if path.is_dir() else []
        hint = f"; there is {below[0]}" if below else ""
        raise DataError(f"{path} is not a run: it has no {METRICS_FILE}{hint}")
    return found


def read_runs(files: Sequence[Path]) -> list[RunCurves]:
    """Read metrics files; runs are named by their directory, or by their path if that is equal."""
    names = [file.resolve().parent.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.parent) for file in files]
    return [read_run(file, name) for file, name in zip(files, names, strict=True)]


def read_run(file: Path, name: str) -> RunCurves:
    """Read one metrics file.

    Raises:
        DataError: No line has an iteration and a finite loss.
    """
    curves: dict[str, dict[int, float]] = {}
    unreadable = 0
    for line in file.read_text("utf-8", errors="replace").splitlines():
        record = _record(line)
        if record is None:
            unreadable += bool(line.strip())
            continue
        for key, value in record.items():
            if _is_number(value):
                curves.setdefault(key, {})[record["iteration"]] = float(value)
    if LOSS not in curves:
        raise DataError(
            f"{file} has no line with 'iteration' and a finite '{LOSS}'; a run writes the first "
            "after --log-interval iterations"
        )
    return RunCurves(
        name, {key: dict(sorted(curve.items())) for key, curve in curves.items()}, unreadable
    )


def _record(line: str) -> dict[str, Any] | None:
    """The line as a mapping with an iteration; None for half a line of a killed run."""
    try:
        record = decode_json(line)
    except ValueError:
        return None
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return record if type(iteration) is int and 0 <= iteration < _MOST_ITERATIONS else None


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value in FINITE


def relative_errors(reference: RunCurves, other: RunCurves) -> Curve:
    """``(other - reference) / reference`` of the training losses, where both have one."""
    theirs = other.curve(LOSS)
    return {
        iteration: (theirs[iteration] - loss) / loss
        for iteration, loss in reference.curve(LOSS).items()
        if iteration in theirs and loss != 0
    }
