"""Numbers, tables and pictures of plans.

Bytes and FLOPs of a table have one unit, which suits the largest. Pictures show the memory of
pipeline ranks by kind, and the front of time and memory.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.cli.plot import COLORS, GREY, figure_class, write_figure

if TYPE_CHECKING:
    from mindspeed.planner.count.check import Check
    from mindspeed.planner.search.result import SearchResult


@dataclass(frozen=True)
class Unit:
    """A unit of bytes or FLOPs; called with a value it gives the digits."""

    name: str
    size: float

    def __call__(self, value: float) -> str:
        return f"{value / self.size:,.3f}"


_BYTES = (Unit("KiB", 2.0**10), Unit("MiB", 2.0**20), Unit("GiB", 2.0**30))
_FLOPS = (Unit("MFLOP", 1e6), Unit("GFLOP", 1e9), Unit("TFLOP", 1e12), Unit("PFLOP", 1e15))


def bytes_unit(values: Iterable[float]) -> Unit:
    return _unit(values, _BYTES)


def flops_unit(values: Iterable[float]) -> Unit:
    return _unit(values, _FLOPS)


def _unit(values: Iterable[float], units: Sequence[Unit]) -> Unit:
    largest = max(values, default=0)
    return next((unit for unit in reversed(units) if largest >= unit.size), units[0])


def ranges(numbers: Sequence[int]) -> str:
    """``0``, ``1-6`` or ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def new_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of names and of numbers."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=title,
        title_style="",
        title_justify="left",
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_whole(table: Table) -> None:
    """Print a table with all its digits, also where the screen is narrower."""
    console = Console()
    width = console.measure(table, options=console.options.update(max_width=1_000)).maximum
    Console(width=max(width, console.width)).print(table)


def memory_table(found: Check, flops: bool = True) -> Table:
    """Bytes and FLOPs of pipeline ranks.

    Args:
        found: counted figures.
        flops: with columns of FLOPs.
    """
    kinds = list(dict.fromkeys(kind for rank in found.ranks for kind in rank.at_peak))
    size = bytes_unit([found.fullest.peak])
    title = f"{size.name} of tensors at the peak of a step, by kind; static: between steps"
    host = ["host"] if any(rank.host for rank in found.ranks) else []
    title += ";\nhost: in host memory between steps, not of the device" if host else ""
    unit = flops_unit(rank.flops for rank in found.ranks)
    title += f";\n{unit.name} of a step, again: those of recomputation" if flops else ""
    more = [unit.name, "again"] if flops else []
    columns = ["parameters", *kinds, "peak", "static", *host, *more]
    table = new_table(title, ["pipeline rank"], columns)
    for rank in found.ranks:
        table.add_row(
            ranges(rank.pipeline_ranks),
            f"{rank.parameters:,}",
            *(size(rank.at_peak.get(kind, 0)) for kind in kinds),
            size(rank.peak),
            size(sum(rank.static.values())),
            *([size(rank.host)] if host else []),
            *([unit(rank.flops), unit(rank.recomputed)] if flops else []),
            style="bold" if rank is found.fullest else "",
        )
    return table


_LIMIT = "#dc2626"
_WIDE = 72
"""Characters above one of two pictures."""
_FAR = 20
"""A limit that is so many times what is needed is left out: it would hide all else."""


def draw_memory(found: Check, output: Path, title: str) -> None:
    """Draw the bytes at the peak of every pipeline rank, and the limit as a line.

    Args:
        found: counted figures.
        output: file to write; its ending chooses the format.
        title: line above the picture.

    Raises:
        ConfigError: unknown format, or matplotlib is missing.
    """
    ranks = {place: rank.at_peak for rank in found.ranks for place in rank.pipeline_ranks}
    figure = figure_class()(figsize=(max(6.0, 2.2 + 0.6 * len(ranks)), 4.2), layout="constrained")
    _stack(figure.add_subplot(), ranks, found.memory_limit)
    figure.suptitle(title, fontsize=11, color="#0f172a")
    write_figure(figure, output)


def draw_plans(plans: Sequence[SearchResult], output: Path) -> None:
    """Draw for each plan the front of time and memory, and the memory of the best layout's ranks.

    Args:
        plans: of one or more numbers of devices.
        output: file to write; its ending chooses the format.

    Raises:
        ConfigError: unknown format, or matplotlib is missing.
    """
    figure = figure_class()(figsize=(12, 4.2 * len(plans)), layout="constrained")
    for row, plan in enumerate(plans):
        _front(figure.add_subplot(len(plans), 2, 2 * row + 1), plan)
        axes = figure.add_subplot(len(plans), 2, 2 * row + 2)
        if plan.candidates:
            found = dict(enumerate(plan.best.prediction.ranks))
            ranks = {r: {**one.static, "activations": one.activations} for r, one in found.items()}
            _stack(axes, ranks, plan.memory_limit)
            title = f"the best: {plan.best.layout} [{axes.get_title(loc='left').split()[0]}]"
            axes.set_title(textwrap.fill(title, _WIDE), loc="left", fontsize=9)
        else:
            axes.set_axis_off()
    write_figure(figure, output)


def _front(axes: Any, plan: SearchResult) -> None:
    sizes = [one.prediction.peak_bytes for one in (*plan.pareto(), *plan.candidates)]
    if not sizes:
        axes.set_axis_off()
        axes.set_title(f"no layout fits {plan.devices} devices of {plan.cluster}", fontsize=10)
        return
    unit = bytes_unit(sizes)
    front = [
        (one.prediction.peak_bytes / unit.size, one.prediction.seconds) for one in plan.pareto()
    ]
    front.sort()
    if front:
        axes.step(*zip(*front, strict=True), where="post", color=COLORS[0], linewidth=1.4)
        axes.plot(*zip(*front, strict=True), "o", color=COLORS[0], label="front")
    for number, one in enumerate(plan.candidates, start=1):
        place = one.prediction.peak_bytes / unit.size, one.prediction.seconds
        axes.plot(*place, "s", color=COLORS[2], label="candidates" if number == 1 else None)
        axes.annotate(f"{number}", place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    if plan.memory_limit <= _FAR * max(sizes):
        limit = plan.memory_limit / unit.size
        axes.axvline(limit, color=_LIMIT, linestyle="--", label="limit")
    axes.set_xlabel(f"{unit.name} on the fullest rank", fontsize=9, color=GREY)
    axes.legend(frameon=False, fontsize=9)
    _plain(axes, f"{plan.devices} devices of {plan.cluster}: modelled seconds of a step")


def _stack(axes: Any, ranks: Mapping[int, Mapping[str, float]], limit: int | None) -> None:
    """A bar for each pipeline rank, its kinds of bytes one above the other."""
    kinds = list(dict.fromkeys(kind for found in ranks.values() for kind in found))
    base, most = dict.fromkeys(ranks, 0.0), max(sum(found.values()) for found in ranks.values())
    unit = bytes_unit([most])
    for color, kind in zip(itertools.cycle(COLORS), kinds, strict=False):
        heights = {place: found.get(kind, 0) / unit.size for place, found in ranks.items()}
        bars = list(heights), list(heights.values())
        axes.bar(*bars, bottom=list(base.values()), color=color, label=kind, width=0.8)
        base = {place: base[place] + height for place, height in heights.items()}
    if limit is not None and limit <= _FAR * most:
        axes.axhline(limit / unit.size, color=_LIMIT, linestyle="--", label="limit")
    axes.set_xticks(sorted(ranks))
    axes.set_xlabel("pipeline rank", fontsize=9, color=GREY)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    _plain(axes, f"{unit.name} of tensors at the peak of a step")


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=GREY)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
