"""Split a step of a rank into the actions of its pipeline schedule.

    segments = Segments()
    with segments.watching(memory):
        step()
    segments.found        # one Segment per action, and one for each time between two actions

Actions are a chunk's forward and backward of a micro-batch, and its weight gradients and its
recomputation where the schedule splits them off. Between actions are messages, and after the last
one the reduction of gradients and the optimizer.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.journal import Journal

BETWEEN = ""


@dataclass(frozen=True)
class Segment:
    """Memory and time from one boundary to the next.

    Attributes:
        op: ``F``, ``Fc``, ``B``, ``I``, ``W``, ``R`` as in a pipeline schedule, or
            :data:`BETWEEN`.
        before: bytes alive at its start.
        peak: largest number of bytes alive in it.
        after: bytes alive at its end.
        start: seconds of the clock at its start; 0 without a clock.
        end: seconds of the clock at its end.
    """

    op: str
    before: int
    peak: int
    after: int
    start: float = 0.0
    end: float = 0.0


class Clock(Protocol):
    """Time of a modelled step."""

    now: float


class Segments:
    """Segments of one step of Megatron's schedules, or of those of :mod:`mindspeed.pipeline`.

    Args:
        clock: clock that times the step, if any.

    Attributes:
        found: the segments so far, without gaps.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.found: list[Segment] = []
        self._clock = clock
        self._inside = False

    @contextlib.contextmanager
    def watching(self, memory: LiveMemory) -> Iterator[None]:
        """Record segments inside the block; the peak of ``memory`` is then that of the block."""
        from mindspeed.adaptor.watched_calls import schedule_steps
        from mindspeed.pipeline.schedule.megatron_work import MegatronWork

        journal = Journal()
        self._memory = memory
        self._whole: tuple[int, Counter[str]] = 0, Counter()
        self._begin()
        try:
            self._wrap(journal, schedule_steps(), "forward_step", lambda args: "F")
            self._wrap(journal, schedule_steps(), "backward_step", lambda args: "B")
            for name in ("forward", "backward", "weight_gradients", "recompute"):
                self._wrap(journal, MegatronWork, name, lambda args: str(args[1].op))
            yield
            self._end(BETWEEN)
            memory.peak, memory.at_peak = self._whole
        finally:
            journal.undo()

    def _wrap(self, journal: Journal, owner: Any, name: str, op_of: Callable[[Any], str]) -> None:
        """Make every outermost call of a function a segment."""
        inner = getattr(owner, name)

        def segment(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # the work of a plan calls Megatron's forward_step
                return inner(*args, **kwargs)
            self._end(BETWEEN)
            self._inside = True
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self._end(op_of(args))

        journal.set(owner, name, segment, owner="planner")

    def _begin(self) -> None:
        self._memory.restart()
        self._before = self._memory.total
        self._start = self._clock.now if self._clock is not None else 0.0

    def _end(self, op: str) -> None:
        """Close the segment that began at the last boundary."""
        memory, start = self._memory, self._start
        now = self._clock.now if self._clock is not None else 0.0
        self.found.append(Segment(op, self._before, memory.peak, memory.total, start, now))
        if memory.peak > self._whole[0]:
            self._whole = memory.peak, Counter(memory.at_peak)
        self._begin()
