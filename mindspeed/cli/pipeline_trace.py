"""``mindspeed pipeline trace DIR``: what a step of ``--pipeline-trace DIR`` did, under its plan."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.cli.comparison import print_comparison
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.pipeline.schedule.trace import Trace


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


def as_data(trace: Trace) -> dict[str, object]:
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
