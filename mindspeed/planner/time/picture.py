"""One step of a layout to look at: what every pipeline rank runs when, and what is alive then.

picture = step_picture(traces, shape, costs, seconds)
picture.ranks[0].actions[3].alive["activations"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.planner.count.recording import planned_step

if TYPE_CHECKING:
    from mindspeed.planner.compose.rank import RankTrace
    from mindspeed.planner.shape import Shape

MOST_ACTIONS = 1_200
"""Of a rank; a longer row is no picture."""


class Drawn(NamedTuple):
    """An action.

    Attributes:
        op: one of :data:`mindspeed.pipeline.schedule.actions.OPS`.
        stage: of the pipeline.
        micro_batch: counted from 0.
        start: seconds from the start of the step.
        end: when it ends.
        top: most bytes alive in it.
        alive: bytes alive when it ends, by kind; ``other`` where the kind is not known.
    """

    op: str
    stage: int
    micro_batch: int
    start: float
    end: float
    top: int
    alive: Mapping[str, int]


@dataclass(frozen=True)
class StepPicture:
    """A step.

    Attributes:
        seconds: its duration, with what follows the last action.
        between: bytes between steps, by kind, of each pipeline rank.
        rows: actions of each pipeline rank.
    """

    seconds: float
    between: tuple[Mapping[str, int], ...]
    rows: tuple[tuple[Drawn, ...], ...]


def step_picture(
    traces: Sequence[RankTrace], shape: Shape, costs: Costs, seconds: float
) -> StepPicture | None:
    """Simulate the schedule and lay the memory of the traces along it; None: it is too long.

    Args:
        traces: all pipeline ranks.
        costs: seconds of its actions.
        seconds: those of the step.
    """
    if any(len(one.step.after) > MOST_ACTIONS for one in traces):
        return None
    rows = tuple(
        tuple(_drawn(one, times, stages))
        for one, times, stages in zip(
            traces, _times(traces, shape, costs), shape.placement.stages, strict=True
        )
    )
    return StepPicture(seconds, tuple(dict(one.static) for one in traces), rows)


def _times(
    traces: Sequence[RankTrace], shape: Shape, costs: Costs
) -> Sequence[Sequence[tuple[float, float]]]:
    """Start and end of every action of each rank."""
    if shape.ranks == 1:  # one after the other
        step = traces[0].step
        ends = [*accumulate(step.seconds[place[:2]] for place in step.row)]
        return [list(zip([0.0, *ends], ends, strict=False))]
    plan = planned_step(shape.request, shape.ranks, shape.chunks, shape.micro_batches)
    return [
        [(start, end) for action, start, end in row if action.microbatch is not None]
        for row in simulate(plan, costs).timeline
    ]


def _drawn(
    trace: RankTrace, times: Sequence[tuple[float, float]], stages: Sequence[int]
) -> list[Drawn]:
    step, between = trace.step, trace.static.total()
    return [
        Drawn(
            place.op,
            stages[place.chunk],
            place.micro_batch,
            start,
            end,
            between + top,
            {kind: n for kind, n in (Counter(trace.static) + changes).items() if n},
        )
        for place, (start, end), top, changes in zip(
            step.row, times, step.tops, step.kinds_after(), strict=True
        )
    ]
