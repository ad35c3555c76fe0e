"""The time that a plan takes, told by the executor while it runs, without measuring any.

Every rank has a clock. An action starts when the rank is free and its message has arrived, which
carries the clock of its sender, and ends after the time that :class:`.costs.Costs` gives it. If the
executor runs what the plan says, the last clock shows the simulator's makespan, on however busy a
machine: figures that a test can assert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.executor import Channels, Tensors
from mindspeed.pipeline.schedule.plan import Plan, Transfer

Buffers = Callable[[Transfer], Tensors | None]


class VirtualTime:
    """The clock of one rank in one step.

    Attributes:
        now: the clock.
        trace: the actions that have run.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self.now = 0.0
        self.trace: list[Action] = []
        self._arrival = 0.0  # of the message that the next action has received
        self._copies = 0.0  # when the stream of O and L is free
        self._loaded: dict[tuple[int, int | None], float] = {}

    def buffers(self, buffers: Buffers) -> Buffers:
        """Room for the clock in every message."""

        def with_clock(transfer: Transfer) -> Tensors | None:
            tensors = buffers(transfer)
            return None if tensors is None else [*tensors, torch.zeros(1, dtype=torch.float64)]

        return with_clock

    def channels(self, channels: Channels) -> Channels:
        """Channels whose messages carry the clock."""
        return _ClockedChannels(self, channels)

    def done(self, action: Action) -> None:
        """Move the clock to the end of ``action``."""
        self.trace.append(action)
        if action in self._plan.paired:
            return  # it ends together with the backward after it
        key = action.stage, action.microbatch
        start = max(self.now, self._arrival)
        self._arrival = 0.0
        if action.op in ("O", "L"):
            length = self._costs.transfer * self._costs.share(self._plan, action.stage)
            assert action.microbatch is not None
            length *= self._plan.size(action.microbatch)
            self._copies = max(start, self._copies) + length
            self._loaded[key] = self._copies
        elif action.op == "W":
            start = max(start, self._loaded.pop(key, 0.0))
        before = self.trace[-2] if len(self.trace) > 1 else None
        if before is not None and before in self._plan.paired:
            self.now = start + self._costs.pair_seconds(self._plan, before, action)
        else:
            self.now = start + self._costs.seconds(self._plan, action)

    def arrived(self, time: float) -> None:
        """The next action has received a message that was sent at ``time``."""
        self._arrival = max(self._arrival, time + self._costs.latency)


class _ClockedChannels:
    """Channels whose messages end with the clock of their sender."""

    def __init__(self, time: VirtualTime, inner: Channels) -> None:
        self._time, self._inner = time, inner

    def expect(self, transfer: Transfer) -> None:
        self._inner.expect(transfer)

    def receive(self, transfer: Transfer) -> Tensors:
        *tensors, clock = self._inner.receive(transfer)
        self._time.arrived(float(clock))
        return tensors

    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        clock = torch.tensor([self._time.now], dtype=torch.float64)
        self._inner.send(transfer, [*tensors, clock])

    def finish(self) -> None:
        self._inner.finish()
