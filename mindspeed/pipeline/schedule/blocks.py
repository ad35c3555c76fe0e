"""Building blocks: when one micro-batch passes each stage, in slots; repeated they are a schedule.

A block says in which slot each stage runs the forward and the backward of the first micro-batch.
The next micro-batch follows ``period`` slots later. How long a stage keeps a micro-batch decides on
memory, so blocks with short ways back need little of it:

    v-min    neighbours 1, 1, 1, 1 slots apart, on the way down, up, and back down and up
    v-half   2, 1, 2, 1
    zb-v     4, 2, 4, 2

:mod:`weave` makes the rows of all ranks from a block. :func:`candidates` is what a search tries
instead of names.

Source: Qi et al., "Pipeline parallelism with controllable memory" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from mindspeed.pipeline.schedule.placement import Placement

_STEPS_DOWN, _STEPS_UP, _GAPS, _PERIODS = (1, 2, 3, 4), (1, 2), (1, 2, 3, 4), (6, 7, 8, 9, 10, 12)


class Walk(NamedTuple):
    """How a micro-batch walks over a snake of stages.

    Attributes:
        steps: slots between neighbouring ranks, one number for each pass: v forward, v backward.
        turns: slots from the last action of a pass to the first of the next, on the same rank.
        period: slots between two micro-batches.
    """

    steps: tuple[int, ...]
    turns: tuple[int, ...]
    period: int

    def __str__(self) -> str:
        steps, turns = (" ".join(map(str, numbers)) for numbers in (self.steps, self.turns))
        return f"steps {steps}, turns {turns}, period {self.period}"


def v_min(ranks: int) -> Walk:
    """A third of the activations of 1F1B."""
    return Walk((1, 1, 1, 1), (1, 1 + (0 if ranks % 3 else 2), 1), 6)


def v_half(ranks: int) -> Walk:
    """Half of the activations of 1F1B."""
    return Walk((2, 1, 2, 1), (1, 1 + (0 if ranks % 2 else 3), 2), 6)


V_ZERO_BUBBLE = Walk((4, 2, 4, 2), (1, 1, 2), 6)


def published_memory(kind: str, ranks: int) -> float:
    """Activations of the fullest rank of ``v-min`` and ``v-half``, in A, as they were published."""
    return float({"v-min": (ranks + 4) // 3, "v-half": (ranks + 2) // 2}[kind])


def candidates() -> Iterator[Walk]:
    """Walks over a V of which a search takes the best for a memory limit."""
    for down in _STEPS_DOWN:
        for up in _STEPS_UP:
            for last in _STEPS_UP:
                for gap in _GAPS:
                    for turn in (1, 2):
                        for period in _PERIODS:
                            yield Walk((down, up, down, last), (1, gap, turn), period)


class Block:
    """The slots of one micro-batch.

    Args:
        placement: a snake (:meth:`Placement.snake`).
        walk: over it.

    Attributes:
        forward: for each stage the slot of its forward.
        backward: of its backward.
    """

    def __init__(self, placement: Placement, walk: Walk) -> None:
        self.placement, self.walk = placement, walk
        p, passes = placement.ranks, len(walk.steps)
        lengths = [(p - 1) * step for step in walk.steps]
        gaps = [a + b for a, b in zip(lengths, walk.turns, strict=False)]
        slots = [
            start + step * place
            for start, step in zip(accumulate(gaps, initial=0), walk.steps, strict=True)
            for place in range(p)
        ]
        self.forward = tuple(slots[: p * passes // 2])
        self.backward = tuple(reversed(slots[p * passes // 2 :]))

    @cached_property
    def collides(self) -> bool:
        """Whether two actions of a rank fall into the same slot of the period."""
        for stages in self.placement.stages:
            slots = [
                one[s] % self.walk.period for one in (self.forward, self.backward) for s in stages
            ]
            if len(set(slots)) < len(slots):
                return True
        return False
