"""The picture of ``mindspeed pipeline plan --plot``: timelines of schedules, one below the other.

One lane per rank, time to the right, the same scale for all schedules, so that the shorter step is
seen. Colours say what is computed, lighter ones a later model chunk; grey is idle. Numbers are
micro-batches, where a box has room. Thin bars at the bottom of a lane are data-parallel reductions
and copies. Drawn without pyplot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.cli.training_plot import GREY, check_format, figure_class, write_figure
from mindspeed.pipeline.schedule.simulate import Simulation

_COLORS = {
    "F": "#3b82f6",
    "Fc": "#67e8f9",
    "R": "#a855f7",
    "B": "#10b981",
    "I": "#14b8a6",
    "W": "#f59e0b",
    "G": "#be123c",
    "O": "#475569",
    "L": "#94a3b8",
}
_NAMES = {
    "F": "forward",
    "Fc": "forward, input kept",
    "R": "recomputation",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "G": "gradient reduction",
    "O": "copy to the host",
    "L": "copy back",
}
_WIDTH, _LANE = 15.0, 0.30  # inches
_DIGIT = 0.0095  # width of a digit in inches, for each point of its font
_SMALLEST, _LARGEST = 3.5, 7.0  # fonts that can still be read, in points
_IDLE = "#e5e9f0"


def draw(simulations: Mapping[str, Simulation], output: Path, title: str) -> None:
    """Draw timelines.

    Args:
        simulations: by the name of the schedule.
        output: File to write; its ending chooses the format.
        title: Line above the picture.

    Raises:
        ConfigError: Unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    ranks = [simulation.plan.placement.ranks for simulation in simulations.values()]
    lanes = [_LANE * count + 0.55 for count in ranks]
    figure = figure_class()(figsize=(_WIDTH, sum(lanes) + 1.1), layout="constrained")
    grid = figure.add_gridspec(len(simulations), 1, height_ratios=lanes)
    longest = max(_end(simulation) for simulation in simulations.values())
    shared = None
    for number, (name, simulation) in enumerate(simulations.items()):
        axes = shared = figure.add_subplot(grid[number], sharex=shared)
        _draw_lanes(axes, simulation, longest)
        axes.set_title(_caption(name, simulation), loc="left", fontsize=9, color="#0f172a")
        if number < len(simulations) - 1:
            axes.tick_params(labelbottom=False)
    axes.set_xlabel("time, in the unit of the costs", fontsize=8, color=GREY)
    figure.suptitle(title, fontsize=11, color="#0f172a")
    figure.legend(
        handles=_legend(simulations.values()),
        loc="outside lower center",
        ncols=9,
        frameon=False,
        fontsize=8,
    )
    write_figure(figure, output)


def _end(simulation: Simulation) -> float:
    return simulation.makespan + simulation.exposed_reduction


def _caption(name: str, simulation: Simulation) -> str:
    text = (
        f"{name}:  step {simulation.makespan:.6g},  bubble {100 * simulation.bubble:.1f} %,  "
        f"memory {max(simulation.peak_memory):.4g} A"
    )
    exposed = simulation.exposed_reduction
    return text + (f",  exposed reduction {exposed:.4g}" if exposed else "")


def _draw_lanes(axes: Any, simulation: Simulation, longest: float) -> None:
    placement = simulation.plan.placement
    inches = (_WIDTH - 0.7) / longest
    for rank in range(placement.ranks):
        low = placement.ranks - 1 - rank
        axes.broken_barh([(0, simulation.makespan)], (low + 0.1, 0.8), facecolors=_IDLE, zorder=0)
        bars: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
        for action, start, end in simulation.timeline[rank]:
            if end == start:
                continue
            shade = 1.0 - 0.5 * placement.chunk(action.stage) / max(placement.chunks - 1, 1)
            bars[action.op, shade].append((start, end - start))
            number = str(action.microbatch)
            font = min(_LARGEST, (end - start) * inches / (_DIGIT * len(number)))
            if font >= _SMALLEST:
                axes.text(
                    (start + end) / 2,
                    low + 0.52,
                    number,
                    ha="center",
                    va="center",
                    fontsize=font,
                    color="#0f172a",
                )
        for (op, shade), spans in bars.items():
            axes.broken_barh(
                spans,
                (low + 0.1, 0.8),
                facecolors=_COLORS[op],
                alpha=shade,
                edgecolor="white",
                linewidth=0.4,
            )
        for action, start, end in simulation.background[rank]:
            if end > start:
                axes.broken_barh(
                    [(start, end - start)], (low - 0.02, 0.12), facecolors=_COLORS[action.op]
                )
    axes.axvline(simulation.makespan, color="#0f172a", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, longest * 1.005)
    axes.set_ylim(-0.05, placement.ranks)
    axes.set_yticks([place + 0.5 for place in range(placement.ranks)])
    axes.set_yticklabels([str(r) for r in reversed(range(placement.ranks))], fontsize=7)
    axes.set_ylabel("rank", fontsize=8, color=GREY)
    axes.tick_params(axis="both", length=0, labelsize=7, colors=GREY)
    for side in axes.spines.values():
        side.set_visible(False)


def _legend(simulations: Any) -> list[Any]:
    from matplotlib.patches import Patch

    found = {action.op for simulation in simulations for _, action in simulation.plan}
    shown = {
        one.action.op
        for simulation in simulations
        for row in simulation.background
        for one in row
        if one.end > one.start
    }
    return [
        Patch(color=color, label=_NAMES[op])
        for op, color in _COLORS.items()
        if op in found and (op not in "GOL" or op in shown)
    ]
