"""Keep what pending weight gradients need on the host while the device is full.

A schedule that defers its weight gradients keeps their inputs alive: nano-pipe on p = 4 ranks with
2 chunks each has 11 of them on every rank, where interleaved 1F1B has 11, 9, 7 and 5. With swap the
device has these: an ``O`` right after an I copies to the host, an ``L`` brings the copy back in
time for its W.

The times of the weight gradients stay; which one a rank computes at such a time is chosen here, so
that few are moved: those that are moved come last, all others in the order of their I. A weight
gradient that would need a load before the last forward waits for the next I instead.

Until a copy has ended, its source is still there: with a slow host the device may have one or two
more than the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOAD,
    OFFLOAD,
    Action,
)
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.simulate import TimedAction, simulate

_ROUNDING = 1e-9


def swap(plan: Plan, costs: Costs, caps: Sequence[float]) -> Plan:
    """``plan`` with offloads and loads.

    Args:
        plan: forwards, I and W; without reductions.
        costs: times, and the bandwidth to the host.
        caps: most activations on the device of each rank, in A.

    Raises:
        ConfigError: forwards alone need more than a cap.
    """
    timeline = simulate(plan, costs).timeline
    rows = [_Row(plan, costs, row, cap).swapped() for row, cap in zip(timeline, caps, strict=True)]
    return replace(plan, rows=tuple(rows))


class _Row:
    """One rank while its weight gradients are chosen.

    Attributes:
        actions: what it does, without O and L.
        memory: on the device after each of them, in A.
        pending: I whose W is still to come, oldest first, with their places in ``actions``.
        away: those of them that are on the host.
    """

    def __init__(self, plan: Plan, costs: Costs, row: Sequence[TimedAction], cap: float) -> None:
        self.plan, self.costs, self.row, self.cap = plan, costs, row, cap
        self.last_forward = max(n for n, one in enumerate(row) if one.action.op == FORWARD)
        self.actions: list[Action] = []
        self.starts: list[float] = []
        self.memory: list[float] = []
        self.pending: dict[Action, int] = {}
        self.away: set[Action] = set()
        self.offloaded: set[Action] = set()
        self.loads: list[tuple[int, Action]] = []  # place in ``actions``, I
        self.stream = 0.0

    def swapped(self) -> tuple[Action, ...]:
        postponed = 0
        for number, (action, start, _) in enumerate(self.row):
            if action.op == BACKWARD_WEIGHT:
                chosen = self._choose(start, late=number > self.last_forward)
                if chosen is None:
                    postponed += 1
                else:
                    self._weight_gradient(chosen, start)
            else:
                if action.op == FORWARD:
                    self._make_room(action)
                elif action.op == BACKWARD_INPUT:
                    self.pending[action] = len(self.actions)
                self._append(action, start, self._change(action))
                if postponed and action.op == BACKWARD_INPUT:
                    postponed -= 1
                    self._weight_gradient(action, start)
        end = self.row[-1].end
        for _ in range(postponed):
            oldest = next(iter(self.pending))
            if oldest in self.away:
                self._load(oldest, len(self.actions), end)
            self._weight_gradient(oldest, end)
        return self._woven()

    def _size(self, action: Action) -> float:
        assert action.microbatch is not None
        return self.costs.share(self.plan, action.stage) * self.plan.size(action.microbatch)

    def _kept(self, action: Action) -> float:
        return self.costs.weight_share * self._size(action)

    def _change(self, action: Action) -> float:
        size = self._size(action)
        if action.op == FORWARD:
            return size
        return self._kept(action) - size if action.op == BACKWARD_INPUT else -size

    def _append(self, action: Action, start: float, change: float) -> None:
        self.actions.append(action)
        self.starts.append(start)
        self.memory.append((self.memory[-1] if self.memory else 0.0) + change)

    def _make_room(self, forward: Action) -> None:
        """Send the oldest pending ones away, as their copies can start first."""
        needed = self._size(forward)
        while self.memory and self.memory[-1] + needed > self.cap + _ROUNDING:
            victim = next((one for one in self.pending if one not in self.away), None)
            if victim is None:
                raise ConfigError(
                    f"{self.plan.name}: {self.memory[-1] + needed:g} A of activations at {forward} "
                    f"cannot be on the host; {self.cap:g} A are allowed"
                )
            self.away.add(victim)
            self.offloaded.add(victim)
            for place in range(self.pending[victim], len(self.memory)):
                self.memory[place] -= self._kept(victim)

    def _choose(self, start: float, late: bool) -> Action | None:
        """The I whose W runs at ``start``; None if all are away and cannot be back."""
        for one in self.pending:
            if one not in self.away:
                return one
            place = self._place(one, start) if late else None
            if place is not None:
                self._load(one, place, start)
                return one
        return None

    def _place(self, one: Action, start: float) -> int | None:
        """The last place where a load can be issued that is back by ``start`` and has room."""
        copy = self.costs.transfer * self._size(one)
        first = self.loads[-1][0] if self.loads else 0
        place = len(self.actions)
        while place > first and self.memory[place - 1] + self._kept(one) <= self.cap + _ROUNDING:
            issued = self.starts[place] if place < len(self.starts) else start
            if max(issued, self.stream) + copy <= start + _ROUNDING:
                return place
            place -= 1
        return None

    def _load(self, one: Action, place: int, start: float) -> None:
        issued = self.starts[place] if place < len(self.starts) else start
        self.stream = max(issued, self.stream) + self.costs.transfer * self._size(one)
        self.loads.append((place, one))
        self.away.discard(one)
        for later in range(place, len(self.memory)):
            self.memory[later] += self._kept(one)

    def _weight_gradient(self, one: Action, start: float) -> None:
        # A load that is issued right before its W does not show in the memory of an earlier action.
        fresh = bool(self.loads) and self.loads[-1] == (len(self.actions), one)
        del self.pending[one]
        change = 0.0 if fresh else -self._kept(one)
        self._append(one._replace(op=BACKWARD_WEIGHT), start, change)

    def _woven(self) -> tuple[Action, ...]:
        loads: dict[int, list[Action]] = {}
        for place, one in self.loads:
            loads.setdefault(place, []).append(one._replace(op=LOAD))
        row: list[Action] = []
        for place, action in enumerate(self.actions):
            row += [*loads.get(place, ()), action]
            if action in self.offloaded:
                row.append(action._replace(op=OFFLOAD))
        return tuple(row)
