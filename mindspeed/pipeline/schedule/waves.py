"""Waves: stages go down the ranks and up again, several times (Hanayo).

    rank 0    stage 0  stage 5  stage 6  stage 11     p = 3, v = 4: stage s is on rank s mod p in
    rank 1    stage 1  stage 4  stage 7  stage 10     even chunks, counted from the end in odd ones
    rank 2    stage 2  stage 3  stage 8  stage 9

At a turn a rank hands on to itself: v - 1 of the v p - 1 hand-offs of a micro-batch cost no
message. A wave is woven from the best of few blocks with equal steps. With whole backwards, as
published, it pays where a step has about p micro-batches; with divided ones the bubble is
(p - 1) / v for F = I = W at any number, within p A where the interleaved order keeps
p + (p - 1) / v.

Source: Liu et al., "Hanayo: harnessing wave-like pipeline parallelism" (SC 2023).
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.pipeline.schedule.blocks import Block, Walk
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.weave import FEW_WAYS, WAYS, WeavingJob, Woven, least_memory, woven

_ROUNDING = 1e-9
_BEST = 2  # blocks that are woven in every way


def walks(chunks: int) -> Iterator[Walk]:
    """Walks over v chunks with equal steps forward and equal ones backward."""
    for forward, backward in ((1, 1), (1, 2), (2, 2)):
        for period in (3 * chunks // 2, 2 * chunks, 3 * chunks, 4 * chunks):
            for gap in (1, 2):
                turns = (1,) * (chunks - 1) + (gap,) + (backward,) * (chunks - 1)
                yield Walk((forward,) * chunks + (backward,) * chunks, turns, period)


def least(placement: Placement, job: WeavingJob) -> float:
    """Least memory that one of the blocks needs, in A."""
    return min(least_memory(Block(placement, walk), job) for walk in walks(placement.chunks))


def wave(placement: Placement, job: WeavingJob, cap: float, name: str = "wave") -> Woven | None:
    """The shortest step of the blocks that fit, of equally short ones that of least memory.

    Args:
        placement: a snake.
        job: micro-batches and costs; ``whole`` backwards are not divided.
        cap: most activations of a rank, in A.
        name: of the plan.

    Returns:
        The plan without reductions; None if no block fits.
    """
    blocks = [Block(placement, walk) for walk in walks(placement.chunks)]
    fitting = [block for block in blocks if least_memory(block, job) <= cap + _ROUNDING]
    ways = WAYS[:2] if job.whole else FEW_WAYS  # only weight gradients have a policy
    found = [(woven(block, job, cap, name, ways), block) for block in fitting]
    found.sort(key=lambda one: (round(one[0].makespan, 6), one[0].peak))
    if not found or job.whole:
        return found[0][0] if found else None
    best = [woven(block, job, cap, name) for _, block in found[:_BEST]]
    return min(best, key=lambda one: (round(one.makespan, 6), one.peak))
