"""Times of the actions of one training step, taken while it runs.

``--pipeline-trace DIR``: in the third step the ranks of the first pipeline wait for each other,
then each marks the start and end of its actions on its device and writes them when the step is
over (:mod:`.trace`). All other steps run as without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed import device
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.executor import Tensors, Work
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import TimedAction
from mindspeed.pipeline.schedule.trace import write_rank

STEP = 3  # the first ones allocate and compile
_FORWARD = 1 / 3  # of a pair, whose members have no times of their own


class StepTracer:
    """Chooses the step, and writes it.

    Args:
        folder: for the files of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._steps = folder, 0

    def starts(self, pp_group: Any) -> bool:
        """Count a training step; whether it is the one, and this rank is in the first pipeline."""
        self._steps += 1
        return self._steps == STEP and dist.get_process_group_ranks(pp_group)[0] == 0

    def run(self, plan: Plan, pp_group: Any, work: Work, execute: Callable[[Work], None]) -> None:
        """Execute a step and write when its actions ran."""
        timed = TimedWork(work)
        device.current().synchronize()
        dist.barrier(group=pp_group)
        timed.start()
        execute(timed)
        write_rank(self._folder, plan, pp_group.rank(), STEP, timed.times())


class TimedWork:
    """Work whose actions are marked on the device (:class:`.executor.Work`)."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._origin: Any = None
        self._marks: list[tuple[tuple[Action, ...], Any, Any]] = []

    def start(self) -> None:
        """The moment from which times count."""
        self._origin = _mark()

    def times(self) -> list[TimedAction]:
        """Every action with start and end, in seconds."""
        device.current().synchronize()
        found: list[TimedAction] = []
        for actions, *marks in self._marks:
            start, end = (self._origin.elapsed_time(mark) / 1e3 for mark in marks)
            middle = start + (end - start) * _FORWARD
            if len(actions) == 1:
                found.append(TimedAction(actions[0], start, end))
            else:
                found.append(TimedAction(actions[0], start, middle))
                found.append(TimedAction(actions[1], middle, end))
        return found

    def forward(self, action: Action, inputs: Tensors) -> Tensors:
        """Marked."""
        return self._marked((action,), lambda: self._work.forward(action, inputs))

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        """Marked."""
        return self._marked((action,), lambda: self._work.backward(action, gradients))

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Marked, both together."""
        return self._marked(
            (forward, backward), lambda: self._work.pair(forward, backward, inputs, gradients)
        )

    def handed_on(self, action: Action) -> None:
        """Pass it on."""
        self._work.handed_on(action)

    def weight_gradients(self, action: Action) -> None:
        """Marked."""
        self._marked((action,), lambda: self._work.weight_gradients(action))

    def recompute(self, action: Action) -> None:
        """Marked."""
        self._marked((action,), lambda: self._work.recompute(action))

    def offload(self, action: Action) -> None:
        """Marked where it is issued."""
        self._marked((action,), lambda: self._work.offload(action))

    def load(self, action: Action) -> None:
        """Marked where it is issued."""
        self._marked((action,), lambda: self._work.load(action))

    def reduce(self, action: Action) -> None:
        """Marked where it is issued."""
        self._marked((action,), lambda: self._work.reduce(action))

    def _marked(self, actions: tuple[Action, ...], run: Callable[[], Any]) -> Any:
        start = _mark()
        result = run()
        self._marks.append((actions, start, _mark()))
        return result


def _mark() -> Any:
    event = device.current().event(timing=True)
    event.record()
    return event
