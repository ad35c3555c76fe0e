"""Recomputation as actions of a schedule: what is recomputed, and when.

A forward ``Fc`` keeps its input only; ``R`` computes the rest again before the backward. As an
action of its own ``R`` can run while its rank waits: for a gradient, or for the pipeline to drain.

* :func:`in_bubble` stores as much as a cap allows and recomputes the rest;
* :func:`in_advance` recomputes everything but the last stage, whose backward follows at once.

Both start from a complete plan and keep the order of its forwards and backwards. A chunk is one
micro-batch on one stage. The weight gradients of a rank may be split off; a chunk is stored until
they are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import (
    BACKWARD_WEIGHT,
    BACKWARDS,
    FORWARD,
    FORWARD_INPUT_ONLY,
    FORWARDS,
    RECOMPUTE,
    Action,
)
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.plan import Plan

Chunk = tuple[int, int]
"""Stage and micro-batch."""
Weight = Callable[[Chunk], float]
Row = Sequence[Action]

_IN_ADVANCE = 2
"""Chunks at once: the one whose backward runs, and the next."""
_ROUNDING = 1e-9


def in_bubble(plan: Plan, costs: Costs, cap: float | None = None) -> Plan:
    """Recompute what does not fit, as far as possible while ranks would be idle.

    Args:
        plan: without recomputation.
        costs: decide where ranks are idle, and how much each chunk stores.
        cap: activations that a rank may store at once, in A: those of one micro-batch over all
            stages of a rank. p (largest) micro-batches by default, as without chunks.

    Raises:
        ConfigError: a rank cannot do with so little.
    """
    placement = plan.placement
    cap = placement.ranks * _largest(plan) if cap is None else cap
    last = placement.num_stages - 1
    weight = _weight(plan, costs)
    dropped = [choose(row, cap, last, weight) for row in plan.rows]
    return place(plan, dropped, cap, costs)


def in_advance(plan: Plan, costs: Costs) -> Plan:
    """Recompute every chunk but those of the last stage, without waiting for its gradient.

    ``R`` moves forward to where its rank is idle, by at most one chunk.
    """
    last = plan.placement.num_stages - 1
    dropped = [{chunk for chunk in _backwards(row) if chunk[0] != last} for row in plan.rows]
    stages = range(plan.placement.num_stages)
    largest = max(costs.share(plan, stage) for stage in stages) * _largest(plan)
    return place(plan, dropped, _IN_ADVANCE * largest, costs)


def choose(row: Row, cap: float, last_stage: int, weight: Weight = lambda chunk: 1.0) -> set[Chunk]:
    """The chunks of a rank to recompute so that it never stores more than ``cap``.

    Wherever too much is stored, the chunk with the latest backward is dropped: it would be in the
    way for longest, so if all weigh the same no choice drops fewer. A dropped chunk still is stored
    during its own backward.

    Args:
        row: actions of the rank, without recomputation.
        cap: sum of the weights of chunks stored at once.
        last_stage: is never dropped, as its backward follows its forward.
        weight: of a chunk; those without are never dropped.

    Raises:
        ConfigError: even without all other chunks the rank stores more.
    """
    starts, ends = _backwards(row), _ends(row)
    total, stored, dropped = 0.0, set[Chunk](), set[Chunk]()
    for position, action in enumerate(row):
        if action.microbatch is None:
            continue
        chunk = _chunk(action)
        if action.op == FORWARD or (chunk in dropped and starts[chunk] == position):
            stored.add(chunk)
            total += weight(chunk)
        while total > cap + _ROUNDING:
            waiting = [
                x for x in stored if x[0] != last_stage and starts[x] > position and weight(x)
            ]
            if not waiting:
                raise ConfigError(
                    f"the activations of {cap:g} micro-batches are too few: at {action} this "
                    f"schedule stores {total:g} that cannot be recomputed"
                )
            victim = max(waiting, key=starts.__getitem__)
            stored.remove(victim)
            total -= weight(victim)
            dropped.add(victim)
        if ends[chunk] == position and chunk in stored:
            stored.remove(chunk)
            total -= weight(chunk)
    return dropped


def place(plan: Plan, dropped: Sequence[Collection[Chunk]], cap: float, costs: Costs) -> Plan:
    """The plan with ``Fc`` and ``R`` for the dropped chunks of each rank.

    ``R`` runs at the first idle moment from which ``cap``, in A, holds until its backward, and
    right before its backward otherwise.
    """
    weight = _weight(plan, costs)
    rows = [
        _Row(row, set(chunks), cap, weight) for row, chunks in zip(plan.rows, dropped, strict=True)
    ]
    times = _Times(plan, costs)
    while any(row.position < len(row.fixed) for row in rows):
        before = sum(row.position for row in rows)
        for rank, row in enumerate(rows):
            _advance(rank, row, times)
        if sum(row.position for row in rows) == before:
            raise ConfigError(f"the pipeline schedule {plan.name} waits for itself")
    return replace(plan, rows=tuple(tuple(row.placed) for row in rows))


class _Row:
    """One rank while ``R`` actions are inserted.

    Attributes:
        fixed: its actions in their order, ``R`` apart.
        position: in ``fixed``, of the next one.
        placed: what it has done.
        clock: when it has done so.
    """

    def __init__(self, row: Row, dropped: Collection[Chunk], cap: float, weight: Weight) -> None:
        self.fixed = [
            action._replace(op=FORWARD_INPUT_ONLY)
            if action.op == FORWARD and _chunk(action) in dropped
            else action
            for action in row
        ]
        self.position, self.clock = 0, 0.0
        self.placed: list[Action] = []
        self._cap, self._weight, self._stored = cap, weight, _stored(row, dropped, weight)
        self._forwards = {_chunk(a): i for i, a in enumerate(row) if a.op == FORWARD}
        self._backwards = _backwards(row)
        self._waiting = deque(chunk for chunk in self._backwards if chunk in dropped)

    def due(self) -> bool:
        """Whether the next action needs the next recomputation."""
        return bool(self._waiting) and self._backwards[self._waiting[0]] == self.position

    def fits(self) -> bool:
        """Whether the next recomputation is possible now, and the cap holds until its backward."""
        if not self._waiting or self._forwards[self._waiting[0]] >= self.position:
            return False
        chunk = self._waiting[0]
        free = self._cap - self._weight(chunk) + _ROUNDING
        until = self._backwards[chunk]
        return all(stored <= free for stored in self._stored[self.position : until])

    def recompute(self) -> Action:
        """The next recomputation, in the order of the backwards; its chunk is stored from now."""
        chunk = self._waiting.popleft()
        for position in range(self.position, self._backwards[chunk]):
            self._stored[position] += self._weight(chunk)
        return Action(RECOMPUTE, *chunk)


class _Times:
    """End times of actions."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._last = plan.placement.num_stages - 1
        self._ends: dict[tuple[bool, int, int | None], float] = {}

    def run(self, rank: _Row, action: Action, ready: float = 0.0) -> None:
        rank.placed.append(action)
        rank.clock = max(rank.clock, ready) + self._costs.seconds(self._plan, action)
        if action.op in FORWARDS or action.op in BACKWARDS:
            self._ends[action.op in FORWARDS, action.stage, action.microbatch] = rank.clock

    def ready(self, rank: int, action: Action) -> float | None:
        """Time at which the inputs of ``action`` have arrived; None: not known yet."""
        forward = action.op in FORWARDS
        if not forward and action.op not in BACKWARDS:
            return 0.0
        if action.stage == (0 if forward else self._last):
            return 0.0
        source = action.stage + (-1 if forward else 1)
        end = self._ends.get((forward, source, action.microbatch))
        if end is None:
            return None
        return end + (self._costs.latency if self._plan.placement.rank(source) != rank else 0.0)


def _advance(rank: int, row: _Row, times: _Times) -> None:
    """Let a rank do what it can."""
    while row.position < len(row.fixed):
        action = row.fixed[row.position]
        if row.due():
            times.run(row, row.recompute())
        ready = times.ready(rank, action)
        if ready is None:
            return
        while row.clock < ready and row.fits():
            times.run(row, row.recompute())
        times.run(row, action, ready)
        row.position += 1


def _chunk(action: Action) -> Chunk:
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _backwards(row: Row) -> dict[Chunk, int]:
    """Chunk -> position of its backward, in their order."""
    return {_chunk(action): i for i, action in enumerate(row) if action.op in BACKWARDS}


def _ends(row: Row) -> dict[Chunk, int]:
    """Chunk -> position of the action after which nothing of it is stored."""
    releases = BACKWARDS | {BACKWARD_WEIGHT}
    return {_chunk(action): i for i, action in enumerate(row) if action.op in releases}


def _stored(row: Row, dropped: Collection[Chunk], weight: Weight) -> list[float]:
    """Activations stored during each action; dropped chunks count from their backward on."""
    ends, sums, total = _ends(row), [], 0.0
    for position, action in enumerate(row):
        if action.microbatch is None:
            sums.append(total)
            continue
        chunk = _chunk(action)
        if action.op in (BACKWARDS if chunk in dropped else FORWARDS):
            total += weight(chunk)
        sums.append(total)
        if ends[chunk] == position:
            total -= weight(chunk)
    return sums


def _weight(plan: Plan, costs: Costs) -> Weight:
    """Activations that a chunk stores, in A."""
    shares = [costs.share(plan, stage) for stage in range(plan.placement.num_stages)]
    return lambda chunk: shares[chunk[0]] * plan.size(chunk[1])


def _largest(plan: Plan) -> float:
    return max(map(plan.size, range(plan.num_microbatches)))
