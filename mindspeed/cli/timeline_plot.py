"""Pictures of timelines, one below the other. No pyplot.

Lanes from top to bottom, time to the right. Timelines without a window have one scale, so that the
shortest is seen. Dotted lines are marks, thin bars at the bottom of a lane belong to a thin lane.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.cli.plot import GREY, check_format, figure_class, write_figure
from mindspeed.instruments.timeline import Interval, Timeline

WAITING = "waiting"
WAIT_COLOR = "#f87171"
_OTHER, _OTHER_COLOR = "other", "#cbd5e1"
_WIDTH, _LANE = 14.0, 0.30  # inches
_TITLE = 140  # characters of a line
_DIGIT = 0.0095  # width of a digit in inches, for each point of its font
_SMALLEST, _LARGEST = 3.5, 7.0  # fonts that can still be read, in points
_SEPARATE = 0.04  # inches: boxes that are narrower have no edge, which would hide them
_IDLE, _DARK = "#eef1f5", "#0f172a"


@dataclass(frozen=True)
class Style:
    """Style of intervals.

    Attributes:
        colors: by what the legend says, in its order.
        label: of an interval, one of ``colors``.
        shade: of an interval, from pale (0) to full (1).
        number: written into the box of an interval where it has room.
        scale: of times.
        unit: of scaled times.
    """

    colors: Mapping[str, str]
    label: Callable[[Interval], str]
    shade: Callable[[Interval], float] = lambda one: 1.0
    number: Callable[[Interval], str] = lambda one: ""
    scale: float = 1e3
    unit: str = "ms"

    def label_of(self, one: Interval) -> str:
        """Legend entry of an interval."""
        if one.kind == "wait":
            return WAITING
        label = self.label(one)
        return label if label in self.colors else _OTHER

    @property
    def every_color(self) -> dict[str, str]:
        """Colors, with those of waits and of all else."""
        return {**self.colors, _OTHER: _OTHER_COLOR, WAITING: WAIT_COLOR}


def draw(timelines: Mapping[str, Timeline], style: Style, output: Path, title: str) -> None:
    """Draw timelines.

    Args:
        timelines: by the lines above them.
        style: how their intervals look.
        output: file to write; its ending chooses the format.
        title: line above the picture.

    Raises:
        ConfigError: unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    heights = [_LANE * len(line.full_lanes) + 0.55 for line in timelines.values()]
    figure = figure_class()(figsize=(_WIDTH, sum(heights) + 1.2), layout="constrained")
    grid = figure.add_gridspec(len(timelines), 1, height_ratios=heights)
    whole = (0.0, max(one.end for line in timelines.values() for one in line.intervals))
    for number, (caption, line) in enumerate(timelines.items()):
        axes = figure.add_subplot(grid[number])
        _Panel(axes, line, style, line.window or whole).draw()
        axes.set_title(caption, loc="left", fontsize=9, color=_DARK)
        if line.window is None and number < len(timelines) - 1:
            axes.tick_params(labelbottom=any(one.window for one in timelines.values()))
    axes.set_xlabel(style.unit, fontsize=8, color=GREY)
    figure.suptitle(textwrap.fill(title, _TITLE), fontsize=11, color=_DARK)
    used = {
        style.label_of(one) for line in timelines.values() for one in line.intervals if _lasts(one)
    }
    figure.legend(
        handles=_legend(style, used), loc="outside lower center", ncols=7, frameon=False, fontsize=8
    )
    write_figure(figure, output)


def _lasts(one: Interval) -> bool:
    return one.end > one.start


def _legend(style: Style, used: set[str]) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(color=color, label=label)
        for label, color in style.every_color.items()
        if label in used
    ]


class _Panel:
    """One timeline on axes of its own."""

    def __init__(
        self, axes: Any, line: Timeline, style: Style, window: tuple[float, float]
    ) -> None:
        self._axes, self._line, self._style = axes, line, style
        self._start, self._end = (time * style.scale for time in window)
        self._inches = (_WIDTH - 1.0) / max(self._end - self._start, 1e-12)

    def draw(self) -> None:
        axes, lanes = self._axes, self._line.full_lanes
        low = {lane: len(lanes) - 1 - place for place, lane in enumerate(lanes)}
        idle = [(0, self._line.end * self._style.scale)]
        for lane in lanes:
            axes.broken_barh(idle, (low[lane] + 0.1, 0.8), facecolors=_IDLE, zorder=0)
            self._boxes(lane, low[lane] + 0.1, 0.8)
            self._numbers(lane, low[lane] + 0.52)
        for lane, other in self._line.thin.items():
            self._boxes(lane, low[other] - 0.02, 0.12, shaded=False)
        for mark in self._line.marks:
            axes.axvline(mark * self._style.scale, color=_DARK, linewidth=0.8, linestyle=":")
        self._frame(lanes)

    def _span(self, one: Interval) -> tuple[float, float]:
        return one.start * self._style.scale, one.seconds * self._style.scale

    def _boxes(self, lane: str, low: float, height: float, shaded: bool = True) -> None:
        """Draw those of equal looks at once: a step has thousands."""
        spans: dict[tuple[str, float, bool], list[tuple[float, float]]] = defaultdict(list)
        for one in self._line.by_lane[lane]:
            span = self._span(one)
            separate = span[1] * self._inches > _SEPARATE
            shade = self._style.shade(one) if shaded else 1.0
            spans[self._style.label_of(one), shade, separate].append(span)
        for (label, shade, separate), found in spans.items():
            self._axes.broken_barh(
                found,
                (low, height),
                facecolors=self._style.every_color[label],
                alpha=shade,
                edgecolor="white",
                linewidth=0.4 if separate else 0,
            )

    def _numbers(self, lane: str, middle: float) -> None:
        for one in self._line.by_lane[lane]:
            if number := self._style.number(one):
                start, length = self._span(one)
                font = min(_LARGEST, length * self._inches / (_DIGIT * len(number)))
                if font >= _SMALLEST:
                    self._axes.text(
                        start + length / 2, middle, number, ha="center", va="center",
                        fontsize=font, color=_DARK,
                    )  # fmt: skip

    def _frame(self, lanes: list[str]) -> None:
        axes = self._axes
        axes.set_xlim(self._start, self._end + 0.005 * (self._end - self._start))
        axes.set_ylim(-0.05, len(lanes))
        axes.set_yticks([len(lanes) - 0.5 - place for place in range(len(lanes))])
        axes.set_yticklabels(lanes, fontsize=7)
        axes.set_ylabel(self._line.lane_title, fontsize=8, color=GREY)
        axes.tick_params(axis="both", length=0, labelsize=7, colors=GREY)
        for side in axes.spines.values():
            side.set_visible(False)
