"""Pictures of plans: the memory of every pipeline rank, stacked by kind. Drawn without pyplot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.training_plot import COLORS, GREY, figure_class, write_figure

if TYPE_CHECKING:
    from mindspeed.planner.check import Check

GIB = 2**30
_LIMIT = "#dc2626"


def draw_memory(found: Check, output: Path, title: str) -> None:
    """Draw the bytes at the peak of every pipeline rank, and the limit as a line.

    Args:
        found: counted figures.
        output: file to write; its ending chooses the format.
        title: line above the picture.

    Raises:
        ConfigError: unknown format, or matplotlib is missing.
    """
    ranks = {place: rank for rank in found.ranks for place in rank.pipeline_ranks}
    kinds = list(dict.fromkeys(kind for rank in found.ranks for kind in rank.at_peak))
    figure = figure_class()(figsize=(max(6.0, 2.2 + 0.6 * len(ranks)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    base = dict.fromkeys(ranks, 0.0)
    for color, kind in zip(COLORS, kinds, strict=False):
        heights = {place: rank.at_peak.get(kind, 0) / GIB for place, rank in ranks.items()}
        axes.bar(
            list(heights),
            list(heights.values()),
            bottom=[base[place] for place in heights],
            color=color,
            label=kind,
            width=0.8,
        )
        base = {place: base[place] + height for place, height in heights.items()}
    if found.memory_limit is not None:
        axes.axhline(found.memory_limit / GIB, color=_LIMIT, linestyle="--", label="limit")
    axes.set_xticks(sorted(ranks))
    axes.set_xlabel("pipeline rank", fontsize=9, color=GREY)
    _plain(axes, "GiB of tensors at the peak of a step")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, color="#0f172a")
    write_figure(figure, output)


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=GREY)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelsize=9, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
