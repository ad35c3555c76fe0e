"""The plot of ``mindspeed attention plan --plot``: which rank computes which part of the mask.

For each algorithm, from top to bottom: the mask (queries downwards, keys to the right), each part
in the colour of the rank that computes it; the owner of each token; work and received bytes of
every rank, relative to the maximum over all algorithms. Drawn without pyplot.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed.attention.algorithm_costs import AlgorithmCosts
from mindspeed.attention.mask import INF, Region
from mindspeed.cli.training_plot import GREY, check_format, figure_class, write_figure

_SIDE = 3.4
_TITLE_CHARACTERS = 34  # per line
_PLOTS_PER_ROW = 4
Point = tuple[float, float]


def draw(found: Sequence[AlgorithmCosts], output: Path, title: str) -> None:
    """Draw plans side by side.

    Args:
        found: Plans and their costs, of one mask.
        output: File to write; its ending chooses the format.
        title: Line above the picture.

    Raises:
        ConfigError: Unknown format, or matplotlib is missing.
    """
    check_format("--plot", output)
    across = min(len(found), _PLOTS_PER_ROW)
    rows = -(-len(found) // across)
    figure = figure_class()(
        figsize=(_SIDE * across + 0.6, (_SIDE + 2.6) * rows + 0.5), layout="constrained"
    )
    heights = [1.0, 0.06, 0.26, 0.26] * rows
    grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
    most = [max(max(column) for column in columns) for columns in _columns(found)]
    for number, one in enumerate(found):
        row, column = divmod(number, across)
        axes = [figure.add_subplot(grid[4 * row + part, column]) for part in range(4)]
        colors = _colors(one.sharding.ranks)
        _draw_map(axes[0], one, colors)
        _draw_owners(axes[1], one, colors)
        names = ("work", "received")
        for place, values, top, name in zip(
            axes[2:], (one.work, _received(one)), most, names, strict=True
        ):
            _draw_bars(place, values, top, colors, name)
    title = textwrap.fill(title, _TITLE_CHARACTERS * across)
    figure.suptitle(title, fontsize=12, fontweight="bold", color="#0f172a")
    write_figure(figure, output)


def _columns(
    found: Sequence[AlgorithmCosts],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [one.work for one in found], [_received(one) for one in found]


def _received(one: AlgorithmCosts) -> tuple[int, ...]:
    return tuple(sum(both) for both in zip(one.forward, one.backward, strict=True))


def _colors(ranks: int) -> list[Any]:
    from matplotlib import colormaps

    if ranks <= 10:
        return [colormaps["tab10"](rank) for rank in range(ranks)]
    return [colormaps["turbo"]((rank + 0.5) / ranks) for rank in range(ranks)]


def _draw_map(axes: Any, one: AlgorithmCosts, colors: list[Any]) -> None:
    from matplotlib.collections import PolyCollection

    size = one.plan.mask.size
    inner = one.sharding.ranks // one.plan.ranks  # ranks that share a part by heads
    for rank in range(one.plan.ranks):
        parts = [corners(part) for stage in one.plan.forward for part in stage.work[rank]]
        if parts:
            color = colors[rank * inner]
            axes.add_collection(
                PolyCollection(parts, facecolors=[color], edgecolors=[color], linewidths=0.2)
            )
    axes.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(one.name, fontsize=11, color="#0f172a")
    axes.set_ylabel("queries" if inner == 1 else f"queries ({inner} ranks share heads)", color=GREY)
    axes.set_xlabel("keys", color=GREY, fontsize=8)


def corners(region: Region) -> list[Point]:
    """Outline of a mask region in (key, query) points: a rectangle clipped by two diagonals."""
    q0, q1, k0, k1, lo, hi = region
    outline: list[Point] = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    if lo != -INF:
        outline = _clip(outline, 1, lo)
    if hi != INF:  # a token is a unit square, including its far corner
        outline = _clip(outline, -1, -(hi + 1))
    return outline


def _clip(outline: list[Point], sign: int, least: int) -> list[Point]:
    """Clip a convex outline to ``sign (key - query) >= least``."""
    kept: list[Point] = []
    for here, there in zip(outline, outline[1:] + outline[:1], strict=True):
        inside, after = (sign * (key - query) - least for key, query in (here, there))
        if inside >= 0:
            kept.append(here)
        if (inside > 0) != (after > 0) and inside and after:
            share = inside / (inside - after)
            kept.append(
                (here[0] + share * (there[0] - here[0]), here[1] + share * (there[1] - here[1]))
            )
    return kept


def _draw_owners(axes: Any, one: AlgorithmCosts, colors: list[Any]) -> None:
    for rank, own in enumerate(one.sharding.segments):
        axes.broken_barh([(a, b - a) for a, b in own], (0, 1), facecolors=colors[rank])
    axes.set(xlim=(0, one.sharding.size), ylim=(0, 1), xticks=[], yticks=[])
    axes.set_xlabel("owner of each token", color=GREY, fontsize=8)


def _draw_bars(axes: Any, values: Sequence[int], top: int, colors: list[Any], name: str) -> None:
    shares = [value / max(top, 1) for value in values]
    axes.bar(range(len(shares)), shares, color=colors, width=0.85)
    axes.axhline(sum(shares) / len(shares), color=GREY, linewidth=0.8, linestyle="--")
    axes.set(ylim=(0, 1.05), xticks=[], yticks=[0, 1])
    axes.set_ylabel(name, color=GREY, fontsize=9)
    axes.tick_params(labelsize=8, colors=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
