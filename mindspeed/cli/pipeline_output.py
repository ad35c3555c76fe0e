"""What ``mindspeed pipeline`` shows besides schedules: the front, and a step that has run.

The front (``plan --front``) says what less memory costs. A point is a schedule on a V-shape that no
other beats in both memory and time; it trains with ``--pipeline-schedule v-auto`` and a memory
limit between it and the next one. Schedules with a name are drawn beside it. A trace
(``trace DIR``) says what a step of ``--pipeline-trace DIR`` did, under its plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from mindspeed.cli.comparison import print_comparison
from mindspeed.cli.plot import GREY, figure_class, write_figure
from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.comparison import PricedSchedule, ScheduleJob
from mindspeed.pipeline.schedule.front import PricedPlan, front
from mindspeed.pipeline.schedule.schedules import relative_sizes
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.trace import Trace
from mindspeed.pipeline.schedule.weave import WeavingJob

_FRONT, _NAMED = "#0d9488", "#1d4ed8"


def front_of(job: ScheduleJob) -> tuple[PricedPlan, ...]:
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


def front_data(job: ScheduleJob, points: Sequence[PricedPlan]) -> list[dict[str, object]]:
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


def print_front(title: str, job: ScheduleJob, points: Sequence[PricedPlan]) -> None:
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
    title: str, points: Sequence[PricedPlan], named: Sequence[PricedSchedule], output: Path
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


def print_trace(trace: Trace) -> None:
    """A line for each stage, then what to do about it."""
    placement, seconds = trace.plan.placement, trace.stage_seconds()
    work = trace.work()
    mean = sum(work) / len(work)
    ops = [op for op in ("F", "Fc", "R", "B", "I", "W") if op in seconds]
    rows = (
        (
            f"{stage}",
            f"{placement.rank(stage)}",
            *(f"{1e3 * seconds[op][stage]:.3f}" for op in ops),
            f"{one / mean:.2f}",
        )
        for stage, one in enumerate(work)
    )
    title = f"step {trace.step} of {trace.plan.num_microbatches} micro-batches"
    caption = "ms of a micro-batch by action; of the mean: forward and backward of this stage"
    print_comparison(title, caption, "stage", ("rank", *ops, "of the mean"), rows)
    for line in _summary(trace):
        print(line)


def trace_data(trace: Trace) -> dict[str, object]:
    """Plain data for JSON; times in seconds."""
    costs, late = trace.costs(), trace.late_stage()
    return {
        "step": trace.step,
        "seconds": trace.seconds,
        "simulated": simulate(trace.plan, costs).makespan,
        "idle": trace.idle,
        "stages": trace.stage_seconds(),
        "late_stage": None if late is None else late[0],
        "costs": costs_flag(trace),
    }


def costs_flag(trace: Trace) -> str:
    """The value of ``--pipeline-costs``, in ms."""
    costs = trace.costs()
    times = costs.forward, costs.input_gradient, costs.weight_gradient, costs.latency
    return ",".join(f"{1e3 * time:.4g}" for time in times)


def _summary(trace: Trace) -> Iterator[str]:
    planned = simulate(trace.plan, trace.costs()).makespan
    idle = 100 * sum(trace.idle) / len(trace.idle) / trace.seconds
    yield (
        f"step {1e3 * trace.seconds:.3f} ms, simulated with these times {1e3 * planned:.3f} ms; "
        f"ranks idle {idle:.1f} % of it"
    )
    if (late := trace.late_stage()) is not None:
        stage, factor = late
        rank = trace.plan.placement.rank(stage)
        yield (
            f"late: stage {stage} (rank {rank}) takes {factor:.2f} of the mean stage; all others "
            "wait for it. Fewer layers there: --pipeline-model-parallel-layout"
        )
    yield f"next time: --pipeline-costs {costs_flag(trace)}"
