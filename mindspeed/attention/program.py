"""What one rank does of a plan: positions become rows of buffers, parts of the mask become calls.

Made once for a plan and a rank, then run by :mod:`~mindspeed.attention.executor` for every layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mindspeed.attention.calls import Pack, packs
from mindspeed.attention.layout import Rows, length
from mindspeed.attention.mask import Region
from mindspeed.attention.plan import OWN, Move, Plan, Stage, arriving, kept, last_use, leaving
from mindspeed.attention.rows import Index
from mindspeed.attention.transport import Counts

Direction = Literal["forward", "backward"]

ZEROS = -(1 << 30)
"""Gradients that nobody has added anything to."""


@dataclass(frozen=True)
class Transfer:
    """One rank's part in an exchange.

    Attributes:
        tag: See :class:`mindspeed.attention.transport.Post`.
        collective: All ranks take part in one collective.
        buffer: What is sent is taken from here ...
        take: ... these rows, destination by destination.
        sends: ``(destination, rows)``.
        receives: ``(source, rows)``.
        parts: The rows of ``take`` for each destination.
    """

    tag: int
    collective: bool
    buffer: int
    take: Index
    sends: Counts
    receives: Counts
    parts: tuple[Index, ...]

    def returned(self, tag: int) -> Transfer:
        """The way back of what was received."""
        return replace(self, tag=tag, sends=self.receives, receives=self.sends)


@dataclass(frozen=True)
class Call:
    """One operator call.

    Attributes:
        pack: Its sequences.
        queries: Buffer of its queries: ``OWN`` or those that arrived in this stage.
        rows: Which of them.
        keys: Buffer of its keys.
        columns: Which of them.
        first: Nothing has been computed of these queries before.
    """

    pack: Pack
    queries: int
    rows: Index
    keys: int
    columns: Index
    first: bool = False


@dataclass
class Step:
    """A stage, for one rank.

    Attributes:
        fetch: Exchange of keys and values, before the work.
        ask: Exchange of queries, before the work.
        keys: Where the keys are if only values arrive.
        starts: Steps whose exchanges start now.
        calls: The work.
        give: Exchange of gradients of keys and values, after the work.
        taken: What to add the gradients to that arrive with it, one by one: buffer and rows.
        ends: Buffers that nobody needs after the work.
    """

    fetch: Transfer | None = None
    ask: Transfer | None = None
    keys: int | None = None
    starts: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()
    give: Transfer | None = None
    taken: tuple[tuple[int, Index], ...] = ()
    ends: tuple[int, ...] = ()


@dataclass
class Program:
    """One rank's way through a pass.

    Attributes:
        steps: The stages.
        sums: Rows of every buffer that gradients are added up in.
    """

    steps: list[Step]
    sums: dict[int, int] = field(default_factory=dict)

    @property
    def only(self) -> Call | None:
        """The call that is everything there is to do, with all rows; None if there is more."""
        if len(self.steps) > 1 or len(self.steps[0].calls) != 1:
            return None
        (call,) = self.steps[0].calls
        everything = slice(0, self.sums[OWN])
        return call if call.rows.together == call.columns.together == everything else None


def program(plan: Plan, rank: int, direction: Direction, *, positions: bool = False) -> Program:
    """Compile a pass for a rank; made once for equal arguments.

    Args:
        plan: What to do.
        rank: Who does it.
        direction: Which pass.
        positions: Calls need to know where queries and keys lie (ALiBi).

    Raises:
        KeyError: Rows are not where the plan expects them; :func:`mindspeed.attention.check` says
            more.
    """
    key = (rank, direction, positions)
    if key not in plan.derived:
        plan.derived[key] = _Compiler(plan, rank, direction, positions).program()
    return plan.derived[key]  # type: ignore[no-any-return]


def calls(
    plan: Plan, stage: Stage, rank: int, rows: dict[int, Rows], positions: bool = False
) -> tuple[Call, ...]:
    """The operator calls of a rank in a stage, whose keys lie in these buffers."""
    queries = {OWN: rows[OWN], 0: Rows([part for m in stage.asked(rank) for part in m.ranges])}
    groups: dict[tuple[int, int], list[Region]] = {}
    for region in stage.work[rank]:
        place = (
            _where((region.q0, region.q1), queries),
            _where((region.k0, region.k1), rows),
        )
        groups.setdefault(place, []).append(region)
    return tuple(
        Call(
            pack,
            asked, Index(queries[asked].slices((p.q0, p.q1) for p in pack.pieces)),
            held, Index(rows[held].slices(part for p in pack.pieces for part in p.keys)),
        )
        for (asked, held), regions in groups.items()
        for pack in packs(regions, positions=positions)
    )  # fmt: skip


def _mark_first(steps: list[Step]) -> None:
    """Find calls on queries of which nothing is known yet; those of others are new in each step."""
    seen: list[Index] = []
    answered = False  # others may have answered for any own query
    for step in steps:
        theirs: list[Index] = []
        marked = []
        for call in step.calls:
            own = call.queries == OWN
            before = seen if own else theirs
            known = (own and answered) or any(call.rows.meets(rows) for rows in before)
            marked.append(replace(call, first=not known))
            before.append(call.rows)
        step.calls = tuple(marked)
        answered = answered or step.ask is not None


def _where(wanted: tuple[int, int], buffers: dict[int, Rows]) -> int:
    for number, rows in buffers.items():
        if rows.has([wanted]):
            return number
    raise KeyError(f"positions {wanted[0]} to {wanted[1] - 1} are in no buffer")


class _Compiler:
    def __init__(self, plan: Plan, rank: int, direction: Direction, positions: bool) -> None:
        self.plan, self.rank, self.positions = plan, rank, positions
        self.stages: Sequence[Stage] = getattr(plan, direction)
        self.own = Rows(plan.layout.segments[rank])
        self.arrived = [_rows(stage.arriving(rank)) for stage in self.stages]
        self.kept: dict[int, Rows] = {}
        self.kept_keys: dict[int, Rows] = {}
        if direction == "backward":
            for stages, found in ((plan.kept, self.kept), (plan.kept_keys, self.kept_keys)):
                for stage in stages:
                    found[kept(stage)] = _rows(plan.forward[stage].arriving(rank))
        self.sums: dict[int, Rows] = {OWN: self.own}  # of gradients
        self.sizes = {OWN: self.own.rows}

    def program(self) -> Program:
        steps = [self.step(number) for number in range(len(self.stages))]
        _mark_first(steps)
        if self.plan.ranks > 1:
            self.gradients(steps)
        return Program(steps, self.sizes)

    def step(self, number: int) -> Step:
        stage = self.stages[number]
        rows = {OWN: self.own, number: self.arrived[number], **self.kept}
        last = last_use(self.stages, self.rank)
        return Step(
            self.transfer(stage.fetch, 4 * number, self.buffer),
            self.transfer(stage.queries, 4 * number + 1, lambda _: (OWN, self.own)),
            self.keys(number) if stage.values_only else None,
            tuple(
                later
                for later, other in enumerate(self.stages)
                if (other.fetch or other.queries) and other.posted == number
            ),
            calls(self.plan, stage, self.rank, rows, self.positions),
            ends=tuple(buffer for buffer, end in enumerate(last) if end == number),
        )

    def buffer(self, move: Move) -> tuple[int, Rows]:
        if move.buffer == OWN:
            return OWN, self.own
        return move.buffer, self.kept[move.buffer] if move.buffer < 0 else self.arrived[move.buffer]

    def transfer(
        self, moves: Sequence[Move], tag: int, source: Callable[[Move], tuple[int, Rows]]
    ) -> Transfer | None:
        if not moves:
            return None
        busiest = Counter(m.src for m in moves) | Counter(m.dst for m in moves)
        leave, arrive = leaving(moves, self.rank), arriving(moves, self.rank)
        sources = [source(move) for move in leave]
        slices = [
            list(rows.slices(move.ranges)) for (_, rows), move in zip(sources, leave, strict=True)
        ]
        buffers = {buffer for buffer, _ in sources}
        if len(buffers) > 1:
            raise KeyError(f"rank {self.rank} sends from several buffers at a time: {leave}")
        by_peer: dict[int, list[slice]] = {}
        for move, parts in zip(leave, slices, strict=True):
            by_peer.setdefault(move.dst, []).extend(parts)
        receives = Counter[int]()
        for move in arrive:
            receives[move.src] += length(move.ranges)
        parts_ = tuple(Index(parts) for parts in by_peer.values())
        return Transfer(
            tag,
            max(busiest.values()) > 1,
            buffers.pop() if buffers else OWN,
            Index(part for parts in by_peer.values() for part in parts),
            tuple((peer, index.rows) for peer, index in zip(by_peer, parts_, strict=True)),
            tuple(receives.items()),
            parts_,
        )

    def keys(self, number: int) -> int | None:
        """The kept keys of the values that arrive, in the same order."""
        arrived = self.arrived[number]
        if not arrived.rows:
            return None
        for buffer, rows in self.kept_keys.items():
            if rows.ranges == arrived.ranges:
                return buffer
        raise KeyError(f"rank {self.rank} has not kept the keys that fit the values of {number}")

    def gradients(self, steps: list[Step]) -> None:
        """Follow sums of gradients: made by the work, added to what arrives, sent on."""
        loose = ZEROS
        before: Step | None = None
        for number, (step, stage) in enumerate(zip(steps, self.stages, strict=True)):
            for call in step.calls:
                if call.keys not in self.sums:
                    rows = self.kept.get(call.keys)
                    self.sums[call.keys] = self.arrived[call.keys] if rows is None else rows
            if before is not None and before.give is not None:
                loose = self.take(before, self.stages[number - 1], loose)
            if stage.give:
                given = [self.holder(move.ranges) for move in leaving(stage.give, self.rank)]
                step.give = self.transfer(stage.give, 4 * number + 2, self._given)
                for buffer in {buffer for buffer in given if buffer not in (None, OWN)}:
                    self.sizes[buffer] = self.sums.pop(buffer).rows
            before = step
        if before is not None and before.give is not None:
            self.take(before, self.stages[-1], loose)
        self.sizes |= {buffer: rows.rows for buffer, rows in self.sums.items()}

    def _given(self, move: Move) -> tuple[int, Rows]:
        holder = self.holder(move.ranges)
        return (ZEROS, Rows(move.ranges)) if holder is None else (holder, self.sums[holder])

    def take(self, step: Step, stage: Stage, loose: int) -> int:
        taken: list[tuple[int, Index]] = []
        for move in arriving(stage.give, self.rank):
            holder = OWN if self.own.has(move.ranges) else self.holder(move.ranges)
            if holder is None:
                loose -= 1
                holder = loose
                self.sums[holder] = Rows(move.ranges)
            taken.append((holder, Index(self.sums[holder].slices(move.ranges))))
        step.taken = tuple(taken)
        return loose

    def holder(self, ranges: Iterable[tuple[int, int]]) -> int | None:
        held = ((buffer, rows) for buffer, rows in self.sums.items() if buffer != OWN)
        return next((buffer for buffer, rows in held if rows.has(ranges)), None)


def _rows(moves: Iterable[Move]) -> Rows:
    return Rows([part for move in moves for part in move.ranges])
