"""``mindspeed plot``: draw loss, learning rate, throughput and memory of one or more runs.

    mindspeed plot runs/a                      writes runs/a/loss.png
    mindspeed plot runs/a runs/b -o ab.svg     compares runs; .png, .svg and .pdf work

A run is a directory with ``metrics.jsonl``, or such a file. Measured values are drawn thin, their
moving average thick, validation losses as points. Panels without data are left out. After a
resume the file may name an iteration twice; the later line counts.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_bytes

HELP = "draw loss, learning rate, throughput and memory of one or more runs"

METRICS_FILE = "metrics.jsonl"
FORMATS = (".png", ".svg", ".pdf")

LOSS, VALIDATION_LOSS = "lm_loss", "validation_loss"
# Panel below the loss -> (key in the metrics file, is it noisy).
PANELS: Mapping[str, tuple[str, bool]] = {
    "learning rate": ("learning_rate", False),
    "tokens/s": ("tokens_per_second", True),
    "memory per device [GB]": ("memory_gb", False),
}
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
GREY = "#475569"

Curve = Mapping[int, float]  # iteration -> value


@dataclass(frozen=True)
class Run:
    """The curves of one metrics file by key."""

    name: str
    curves: Mapping[str, Curve]
    unreadable_lines: int = 0

    def curve(self, key: str) -> Curve:
        """The curve of ``key``, empty if it was never recorded."""
        return self.curves.get(key, {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"with {METRICS_FILE}")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="picture to write (default: loss.png beside the first metrics file)",
    )
    parser.add_argument("--title", help="line above the picture")
    parser.add_argument(
        "--smooth",
        type=float,
        metavar="POINTS",
        help="reach of the moving average to both sides (default: a hundredth of the curve)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the picture and say where it is."""
    files = [metrics_file(path) for path in args.runs]
    output = args.output or files[0].with_name("loss.png")
    runs = read_runs(files)
    draw(runs, output, title=args.title, smooth=args.smooth)
    for run_ in runs:
        if run_.unreadable_lines:
            print(f"{run_.name}: {run_.unreadable_lines} unreadable lines were left out")
    print(f"wrote {output}")
    return 0


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
        raise DataError(f"{path} is no run: it has no {METRICS_FILE}{hint}")
    return found


def read_runs(files: Sequence[Path]) -> list[Run]:
    """Read metrics files; runs are named by their directory, or by their path if that is equal."""
    names = [file.resolve().parent.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.parent) for file in files]
    return [read_run(file, name) for file, name in zip(files, names, strict=True)]


def read_run(file: Path, name: str) -> Run:
    """Read one metrics file.

    Raises:
        DataError: No line has an iteration and a loss.
    """
    curves: dict[str, dict[int, float]] = {}
    unreadable = 0
    for line in file.read_text("utf-8", errors="replace").splitlines():
        record = _record(line)
        if record is None:
            unreadable += bool(line.strip())
            continue
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.setdefault(key, {})[record["iteration"]] = float(value)
    if LOSS not in curves:
        raise DataError(f"{file} has no line with 'iteration' and '{LOSS}'")
    return Run(
        name, {key: dict(sorted(curve.items())) for key, curve in curves.items()}, unreadable
    )


def _record(line: str) -> dict[str, Any] | None:
    """The line as a mapping with an iteration; None for half a line of a killed run."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    valid = isinstance(record, dict) and isinstance(record.get("iteration"), int)
    return record if valid else None


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
    """Draw all runs into one picture.

    Args:
        runs: What to draw.
        output: File to write; its ending chooses the format.
        title: Line above the picture.
        smooth: Reach of the moving average in points; None for a hundredth of the curve.

    Raises:
        ConfigError: The ending is not known, or matplotlib is not installed.
    """
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output {output}: the file must end in {', '.join(FORMATS)}")
    figure_class = _figure_class()
    panels = [name for name, (key, _) in PANELS.items() if any(run.curve(key) for run in runs)]
    figure = figure_class(figsize=(10, 7.2 if panels else 5), layout="constrained")
    grid = figure.add_gridspec(
        2 if panels else 1, max(len(panels), 1), height_ratios=[2.4, 1][: 1 + bool(panels)]
    )
    _draw_loss(figure.add_subplot(grid[0, :]), runs, smooth)
    for column, name in enumerate(panels):
        _draw_panel(figure.add_subplot(grid[1, column]), runs, name)
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold", color="#0f172a")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=output.suffix[1:], dpi=130)
    atomic_write_bytes(output, buffer.getvalue())


def _figure_class() -> Any:
    # The class draws without pyplot: no display, no global state.
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
