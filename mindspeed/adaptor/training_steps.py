"""Numbers of steps and micro-batches for features that watch a training.

    steps = TrainingSteps()
    seams.schedule.add(lambda function: steps.watched(function, run), ...)   # run(function, given)
    steps.number                                                             # of the one that runs

A framework without Megatron-LM's trainer has no seam ``step``: its calls of the schedule are
counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any


class TrainingSteps:
    """The training steps of this rank."""

    def __init__(self) -> None:
        self._announced: int | None = None
        self._calls = 0

    @property
    def number(self) -> int:
        """Number of the step that runs, from 0."""
        return self._calls - 1 if self._announced is None else self._announced

    def announce(self, iteration: int) -> None:
        """Note the iteration that begins, from 1, at the seam ``step``."""
        self._announced = iteration - 1

    def watched(
        self,
        schedule: Callable[..., Any],
        run: Callable[[Callable[..., Any], dict[str, Any]], Any],
    ) -> Callable[..., Any]:
        """Wrap the schedule, at its seam.

        Args:
            schedule: Megatron's forward-backward function, or one that wraps it; all of them take
                keywords only.
            run: Called with it and its arguments by name, in each step that trains.
        """

        @functools.wraps(schedule)
        def watching(**given: Any) -> Any:
            if given.get("forward_only"):
                return schedule(**given)
            self._calls += 1
            return run(schedule, given)

        return watching


class MicroBatchNumbers:
    """Numbers of micro-batches in a step, over all data-parallel ranks."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._rank = parallel_state.get_data_parallel_rank()
        self._ranks = parallel_state.get_data_parallel_world_size()
        self._begun: Counter[int] = Counter()

    def next(self, model: Any) -> int:
        """The number of the next micro-batch whose forward a model chunk runs."""
        number = self._begun[id(model)] * self._ranks + self._rank
        self._begun[id(model)] += 1
        return number
