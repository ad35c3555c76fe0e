"""The picture of ``mindspeed moe plan --plot``: timelines of a layer, one program below the other.

Each program has a lane of computation and one for each group of ranks that communicates; all have
one scale, and a dotted line divides forward from backward. Red is waiting. Drawn without pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.cli.training_plot import GREY, check_format, figure_class, write_figure
from mindspeed.moe.costs import BACKWARD, FORWARD
from mindspeed.moe.timeline import COMPUTE, Interval, Timeline

# Colour of stages -> (label, names)
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "#10b981": ("experts", ("experts",)),
    "#f59e0b": ("weight gradients of experts", ("weight_gradients",)),
    "#3b82f6": ("shared experts", ("shared", "shared_fc1", "shared_fc2")),
    "#fcd34d": ("hot experts", ("hot",)),
    "#818cf8": ("attention", ("attn",)),
    "#94a3b8": ("router", ("route",)),
    "#67e8f9": (
        "rows moved",
        ("permute", "unpermute", "arrange", "disarrange", "relay", "merge"),
    ),
    "#a855f7": ("computed again", ("recompute", "recompute_shared")),
    "#0f766e": ("dispatch", ("dispatch", "dispatch_node", "tokens")),
    "#be185d": ("combine", ("combine", "combine_node")),
    "#7c3aed": ("dispatch again", ("refetch",)),
    "#ca8a04": ("slices: gather, sum", ("gather", "scatter")),
    "#475569": ("counts, ids, weights", ("count", "ids", "weights")),
}
_WAIT, _OTHER = "#f87171", "#cbd5e1"
_COLORS = {name: color for color, (_, names) in _KINDS.items() for name in names}
_WIDTH, _LANE = 13.0, 0.26  # inches
_VISIBLE = 1e-3  # part of the time


def draw(timelines: Mapping[str, Timeline], output: Path, title: str) -> None:
    """Draw timelines.

    Args:
        timelines: by the name of the program.
        output: File to write; its ending chooses the format.
        title: Line above the picture.

    Raises:
        ConfigError: Unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    lanes = {name: _lanes(line) for name, line in timelines.items()}
    heights = [_LANE * len(found) + 0.42 for found in lanes.values()]
    figure = figure_class()(figsize=(_WIDTH, sum(heights) + 1.3), layout="constrained")
    grid = figure.add_gridspec(len(timelines), 1, height_ratios=heights)
    longest = max(line.total for line in timelines.values()) * 1e3
    for number, (name, line) in enumerate(timelines.items()):
        axes = figure.add_subplot(grid[number])
        _draw_program(axes, line, lanes[name])
        axes.set_xlim(0, longest * 1.005)
        axes.set_title(_caption(name, line), loc="left", fontsize=9, color="#0f172a")
        if number < len(timelines) - 1:
            axes.tick_params(labelbottom=False)
    axes.set_xlabel("ms", fontsize=8, color=GREY)
    figure.suptitle(title, fontsize=11, color="#0f172a")
    figure.legend(
        handles=_legend(timelines), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    write_figure(figure, output)


def _lanes(line: Timeline) -> list[str]:
    """Streams with something that can be seen."""
    streams = dict.fromkeys([COMPUTE, *(one.stream for one in line.intervals)])
    longest = {
        stream: max((one.seconds for one in line.intervals if one.stream == stream), default=0.0)
        for stream in streams
    }
    seen = [stream for stream in streams if longest[stream] > _VISIBLE * line.total]
    return seen or [COMPUTE]


def _caption(name: str, line: Timeline) -> str:
    exposed = [len(line.log.exposed(phase)) for phase in (FORWARD, BACKWARD)]
    return (
        f"{name}:  {line.total * 1e3:.4g} ms, waiting {line.exposed() * 1e3:.3g} ms,  exposed "
        f"collectives {exposed[0]} + {exposed[1]} of {line.calls(FORWARD)} + "
        f"{line.calls(BACKWARD)}"
    )


def _color(one: Interval) -> str:
    return _WAIT if one.kind == "wait" else _COLORS.get(one.name.partition(".")[0], _OTHER)


def _draw_program(axes: Any, line: Timeline, lanes: list[str]) -> None:
    for one in line.intervals:
        if one.stream not in lanes:
            continue
        low = len(lanes) - 1 - lanes.index(one.stream)
        axes.broken_barh(
            [(one.start * 1e3, one.seconds * 1e3)],
            (low + 0.08, 0.84),
            facecolors=_color(one),
            edgecolor="white",
            linewidth=0.3,
        )
    if line.ends[FORWARD] < line.total:  # else forward and backward run at once
        axes.axvline(line.ends[FORWARD] * 1e3, color="#0f172a", linewidth=0.8, linestyle=":")
    axes.set_ylim(-0.05, len(lanes))
    axes.set_yticks([len(lanes) - 0.5 - place for place in range(len(lanes))])
    axes.set_yticklabels(lanes, fontsize=7)
    axes.tick_params(axis="both", length=0, labelsize=7, colors=GREY)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(timelines: Mapping[str, Timeline]) -> list[Any]:
    from matplotlib.patches import Patch

    used = {_color(one) for line in timelines.values() for one in line.intervals}
    found = [
        Patch(color=color, label=label) for color, (label, _) in _KINDS.items() if color in used
    ]
    if _OTHER in used:
        found.append(Patch(color=_OTHER, label="other"))
    return [*found, Patch(color=_WAIT, label="waiting")]
