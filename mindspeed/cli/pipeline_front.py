"""What less memory costs: the front of ``mindspeed pipeline plan --front`` as table, JSON, picture.

A point is a schedule on a V-shape that no other beats in both memory and time; it trains with
``--pipeline-schedule v-auto`` and a memory limit between it and the next one. Schedules with a name
are drawn beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mindspeed.cli.comparison import print_comparison
from mindspeed.cli.plot import GREY, figure_class, write_figure
from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.comparison import Job, Priced
from mindspeed.pipeline.schedule.front import Candidate, front
from mindspeed.pipeline.schedule.schedules import relative_sizes
from mindspeed.pipeline.schedule.weave import WeavingJob

_FRONT, _NAMED = "#0d9488", "#1d4ed8"


def front_of(job: Job) -> tuple[Candidate, ...]:
    """The points within the memory limit of the job.

    Raises:
        ConfigError: there is none; names the one that needs least.
    """
    sizes = relative_sizes(job.sizes)
    points = front(job.ranks, WeavingJob(job.num_microbatches, job.costs_for(2), sizes))
    limit = job.memory_limit
    found = tuple(one for one in points if limit is None or one.peak <= limit + 1e-6)
    if not found:
        first = points[0]
        raise ConfigError(
            f"{limit:g} A of activations (--pipeline-memory-limit) are below the first point of "
            f"the front: {first.peak:g} A ({first.origin})"
        )
    return found


def as_data(job: Job, points: Sequence[Candidate]) -> list[dict[str, object]]:
    """Plain data for JSON."""
    return [
        {
            "memory": one.peak,
            "limit": one.peak / job.ranks,
            "step": one.time,
            "bubble": one.simulation.bubble,
            "schedule": one.origin,
        }
        for one in points
    ]


def print_front(title: str, job: Job, points: Sequence[Candidate]) -> None:
    """A line for each point, least memory first."""
    rows = (
        (
            one.origin,
            f"{one.peak:.4g}",
            f"{math.ceil(1000 * one.peak / job.ranks) / 1000:g}",
            f"{one.time:.6g}",
            f"{100 * one.simulation.bubble:.1f} %",
        )
        for one in points
    )
    caption = (
        "memory: of the fullest rank, in activations of one micro-batch; limit: the "
        "--pipeline-memory-limit from which --pipeline-schedule v-auto has this point; steps of a "
        "building block: slots between neighbouring ranks on the way down, up, and back; 1F1B "
        f"needs {job.ranks}"
    )
    print_comparison(title, caption, "front", ("memory", "limit", "step", "bubble"), rows)


def draw_front(
    title: str, points: Sequence[Candidate], named: Sequence[Priced], output: Path
) -> None:
    """Bubble over memory: the front as steps, schedules with a name as points."""
    figure = figure_class()(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    memory = [one.peak for one in points]
    bubble = [100 * one.simulation.bubble for one in points]
    axes.step(memory, bubble, where="post", color=_FRONT, label="front on a V-shape (v-auto)")
    axes.plot(memory, bubble, "o", color=_FRONT, markersize=4)
    others: dict[tuple[float, float], list[str]] = {}
    for one in named:
        if one.simulation is not None:
            place = max(one.simulation.peak_memory), 100 * one.simulation.bubble
            others.setdefault((round(place[0], 4), round(place[1], 4)), []).append(one.name)
    for number, ((x, y), names) in enumerate(sorted(others.items())):
        axes.plot([x], [y], "s", color=_NAMED, markersize=4)
        offset = 4, -9 if number % 2 else 4  # neighbours are not written over each other
        axes.annotate(
            ", ".join(names), (x, y), xytext=offset, textcoords="offset points", fontsize=7
        )
    axes.set_xlabel("activations of the fullest rank, in those of one micro-batch")
    axes.set_ylabel("bubble, % of a step")
    axes.set_title(title, fontsize=10)
    axes.grid(color=GREY, linewidth=0.4, alpha=0.5)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    write_figure(figure, output)
