"""The picture of ``mindspeed explain --timeline``: a modelled step and one of its layers.

At the top the whole step: operators by phase, one lane per process group, and in red the time in
which the rank waits. Below, enlarged: one layer's forward, and one layer's backward (after its
recomputation). Drawn without pyplot.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed.cli.training_plot import COLORS, GREY, check_format, figure_class, write_figure
from mindspeed.instruments.clock import Interval
from mindspeed.planner.counted.layer_costs import lane_of
from mindspeed.planner.counted.timed_step import TimedStep

PHASE_COLORS = {"forward": COLORS[0], "recompute": COLORS[3], "backward": COLORS[2]}
WAIT_COLOR = COLORS[1]
LANES_FIRST = ("operators", "waiting")
_LANE = 0.42  # inches


def draw(step: TimedStep, output: Path, title: str) -> None:
    """Draw a timeline.

    Args:
        step: What happened.
        output: File to write; its ending chooses the format.
        title: Line above the picture.

    Raises:
        ConfigError: Unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    visible = [interval for interval in step.intervals if not _of_one_rank(interval)]
    found = {lane_of(interval) for interval in visible}
    lanes = [*(n for n in LANES_FIRST if n in found), *sorted(found - set(LANES_FIRST))]
    parts = [("whole step", visible), *_enlarged(visible)]
    height = len(parts) * (_LANE * max(len(lanes), 2) + 0.7) + 0.8
    figure = figure_class()(figsize=(13, height), layout="constrained")
    for index, (name, intervals) in enumerate(parts):
        _draw_lanes(figure.add_subplot(len(parts), 1, index + 1), name, intervals, lanes)
    figure.suptitle(title, fontsize=11, color="#0f172a")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, frameon=False)
    write_figure(figure, output)


def _of_one_rank(interval: Interval) -> bool:
    return interval.communication is not None and len(interval.communication.ranks) == 1


def _enlarged(intervals: Sequence[Interval]) -> list[tuple[str, list[Interval]]]:
    """A layer in the middle: its first forward, and what happens from there on backwards."""
    names = list(dict.fromkeys(i.scope for i in intervals if ", " in i.scope))
    if not names:
        return []
    layer = names[len(names) // 2]
    parts = []
    for title, phases in (("forward", {"forward"}), ("backward", {"recompute", "backward"})):
        own = [i for i in intervals if i.scope == layer and i.phase in phases]
        if own:
            start, end = own[0].start, max(i.end for i in own if i.kind != "communication")
            within = [i for i in intervals if i.end > start and i.start < end]
            parts.append((f"{layer}, {title}", within))
    return parts


def _draw_lanes(axes: Any, name: str, intervals: Sequence[Interval], lanes: Sequence[str]) -> None:
    places = {lane: len(lanes) - 1 - number for number, lane in enumerate(lanes)}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for interval in intervals:
        waits = interval.kind == "wait"
        color = WAIT_COLOR if waits else PHASE_COLORS.get(interval.phase, GREY)
        bar = (interval.start * 1e3, interval.seconds * 1e3)
        bars.setdefault((places[lane_of(interval)], color), []).append(bar)
    for (place, color), spans in bars.items():
        axes.broken_barh(spans, (place + 0.1, 0.8), facecolors=color, linewidth=0)
    axes.set_yticks([places[lane] + 0.5 for lane in lanes], lanes, fontsize=8)
    axes.set_ylim(0, len(lanes))
    if name != "whole step" and intervals:
        own = [i for i in intervals if i.kind != "communication"]
        axes.set_xlim(min(i.start for i in own) * 1e3, max(i.end for i in own) * 1e3)
    else:
        axes.margins(x=0.005)
    axes.set_title(f"{name} [modelled ms]", loc="left", fontsize=10, color=GREY)
    axes.tick_params(colors=GREY, labelsize=8, length=0)
    axes.grid(axis="x", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    phases = [Patch(color=color, label=phase) for phase, color in PHASE_COLORS.items()]
    return [*phases, Patch(color=WAIT_COLOR, label="waiting: exposed communication")]
