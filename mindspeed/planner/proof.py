"""The memory of a candidate counted again, without composition.

Whole steps of the ranks that can be fullest: the one whose composed bytes are most, and the first
and the last one of the pipeline, if theirs are near them. A step has as many micro-batches as its
schedule needs to have most of them in flight, and as many more as it takes them in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspeed.errors import MindSpeedError
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import build_plan
from mindspeed.planner import isolated
from mindspeed.planner.layout import Layout
from mindspeed.planner.shape import Shape, shape_of

if TYPE_CHECKING:
    from mindspeed.planner.job import Job

NEAR = 0.05
"""Several times what composition may err."""
COUNT_SECONDS = 600.0
"""After which a count is given up."""


def counted_peak(job: Job, layout: Layout, composed: Sequence[float]) -> int:
    """Bytes of the pipeline rank that needs most.

    Args:
        job: that is planned.
        layout: its layout.
        composed: bytes of each pipeline rank.

    Raises:
        MindSpeedError: it cannot be counted.
    """
    stages = ranks_to_count(composed)
    return max(isolated.call(_peak, job, layout, one, timeout=COUNT_SECONDS) for one in stages)


def ranks_to_count(composed: Sequence[float]) -> list[int]:
    """Pipeline ranks one of which is the fullest, though composed bytes may err.

    Args:
        composed: bytes of each.
    """
    most = max(composed)
    chosen = {0, composed.index(most), len(composed) - 1}
    return sorted(rank for rank in chosen if composed[rank] >= (1 - NEAR) * most)


def _peak(job: Job, layout: Layout, stage: int) -> int:
    from mindspeed.planner.counted_step import count_step
    from mindspeed.training.fake_job import rank_in_stage

    args = job.settings(layout.overrides(), layout.devices).args
    batches = enough_micro_batches(shape_of(args), stage)
    return count_step(args, rank_in_stage(args, stage), micro_batches=batches).peak


def enough_micro_batches(shape: Shape, rank: int) -> int:
    """The shortest step in which a rank has as many micro-batches in flight as in a whole one.

    Args:
        shape: of the job.
        rank: of the pipeline.
    """
    count, ranks, chunks = shape.micro_batches, shape.ranks, shape.chunks
    if ranks == 1:
        return min(count, 2)
    turn = (shape.request.group_size or ranks) if chunks > 1 else 1
    longest = min(count, turn * (4 * ranks * chunks // turn + 1))
    whole = _most_in_flight(shape, rank, longest)
    for batches in range(turn, longest, turn):
        try:
            enough = _most_in_flight(shape, rank, batches) == whole
        except MindSpeedError:
            continue  # the schedule needs more of them
        if enough:
            return min(count, batches + turn)
    return longest


def _most_in_flight(shape: Shape, rank: int, micro_batches: int) -> int:
    """Chunks of micro-batches whose activations a rank keeps at most."""
    plan: Plan = build_plan(shape.request, shape.ranks, shape.chunks, micro_batches)
    held = most = 0
    for action in plan.rows[rank]:
        held += _CHANGES.get(action.op, 0)
        most = max(most, held)
    return most


_CHANGES = {"F": 1, "B": -1, "I": -1}
