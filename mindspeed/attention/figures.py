"""What a plan costs, as exact integers: pairs, rows, messages, buffers.

The executor counts the same while it runs, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.attention.layout import length
from mindspeed.attention.plan import Move, Plan, Stage, last_use
from mindspeed.attention.program import Direction, program


@dataclass(frozen=True)
class Sizes:
    """Of the tensors on one tensor-parallel rank.

    Attributes:
        heads: Query heads.
        groups: Key and value heads.
        head_size: Of queries and keys.
        value_size: Of values.
        itemsize: Bytes of an element.
    """

    heads: int
    groups: int
    head_size: int
    value_size: int
    itemsize: int = 2

    @property
    def row(self) -> int:
        """Bytes of one row of keys and values."""
        return self.key_row + self.value_row

    @property
    def key_row(self) -> int:
        """Bytes of one row of keys."""
        return self.groups * self.head_size * self.itemsize

    @property
    def value_row(self) -> int:
        """Bytes of one row of values."""
        return self.groups * self.value_size * self.itemsize

    @property
    def query_row(self) -> int:
        """Bytes of one row of queries, or of their gradients."""
        return self.heads * self.head_size * self.itemsize

    @property
    def output_row(self) -> int:
        """Bytes of one row of the output."""
        return self.heads * self.value_size * self.itemsize

    @property
    def statistics_row(self) -> int:
        """Bytes of one number for each head of a row, in fp32 (of fp64 inputs: fp64)."""
        return self.heads * max(self.itemsize, 4)


@dataclass(frozen=True)
class Figures:
    """Costs of a plan, one number for each rank.

    Attributes:
        area: Pairs computed.
        fetched: Rows of keys and values received in the forward pass.
        refetched: The same in the backward pass.
        values: Rows of which only values were received in the backward pass.
        given: Rows of gradients of keys and values sent in the backward pass.
        returned: The same, received.
        asked: Rows of queries received, in each pass.
        answered: Rows of queries sent, for each of which a result returns in each pass.
        messages: Messages received, both passes.
        pieces: Parts of the mask computed in the forward pass.
        buffer: Most rows of keys and values of others held at a time in the forward pass.
        kept: Rows of keys and values of others held from the forward to the backward pass.
        kept_keys: Rows of which only the keys are held.
    """

    area: tuple[int, ...]
    fetched: tuple[int, ...]
    refetched: tuple[int, ...]
    values: tuple[int, ...]
    given: tuple[int, ...]
    returned: tuple[int, ...]
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    messages: tuple[int, ...]
    pieces: tuple[int, ...]
    buffer: tuple[int, ...]
    kept: tuple[int, ...]
    kept_keys: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean over largest area; 1 is perfect, attention takes 1 / balance of the ideal time."""
        return sum(self.area) / len(self.area) / max(max(self.area), 1)

    def forward_flops(self, sizes: Sizes) -> tuple[int, ...]:
        """Operations of each rank's forward pass."""
        return tuple(2 * a * sizes.heads * (sizes.head_size + sizes.value_size) for a in self.area)

    def backward_flops(self, sizes: Sizes) -> tuple[int, ...]:
        """Operations of each rank's backward pass: five products."""
        each = sizes.heads * (3 * sizes.head_size + 2 * sizes.value_size)
        return tuple(2 * a * each for a in self.area)

    def forward_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes that each rank receives in the forward pass."""
        result = sizes.output_row + sizes.statistics_row
        return tuple(
            fetched * sizes.row + asked * sizes.query_row + answered * result
            for fetched, asked, answered in zip(
                self.fetched, self.asked, self.answered, strict=True
            )
        )

    def backward_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes that each rank receives in the backward pass."""
        query = sizes.query_row + sizes.output_row + 2 * sizes.statistics_row
        return tuple(
            (refetched + returned) * sizes.row
            + values * sizes.value_row
            + asked * query
            + answered * sizes.query_row
            for refetched, returned, values, asked, answered in zip(
                self.refetched, self.returned, self.values, self.asked, self.answered, strict=True
            )
        )

    def kept_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes of others' keys and values that each rank holds until the backward pass."""
        rows = zip(self.kept, self.kept_keys, strict=True)
        return tuple(both * sizes.row + keys * sizes.key_row for both, keys in rows)


def figures(plan: Plan) -> Figures:
    """Price a plan."""
    ranks = range(plan.ranks)
    back = plan.backward
    gives = [m for s in back for m in s.give]
    queries = [m for s in plan.forward for m in s.queries]
    every = [m for s in (*plan.forward, *back) for m in (*s.fetch, *s.give, *s.queries)]
    results = [m.src for s in (*plan.forward, *back) for m in s.queries]
    return Figures(
        area=tuple(sum(r.area() for s in plan.forward for r in s.work[rank]) for rank in ranks),
        fetched=_rows([m for s in plan.forward for m in s.fetch], plan.ranks, "dst"),
        refetched=_rows([m for s in back if not s.values_only for m in s.fetch], plan.ranks, "dst"),
        values=_rows([m for s in back if s.values_only for m in s.fetch], plan.ranks, "dst"),
        given=_rows(gives, plan.ranks, "src"),
        returned=_rows(gives, plan.ranks, "dst"),
        asked=_rows(queries, plan.ranks, "dst"),
        answered=_rows(queries, plan.ranks, "src"),
        messages=tuple(sum(m.dst == rank for m in every) + results.count(rank) for rank in ranks),
        pieces=tuple(sum(len(s.work[rank]) for s in plan.forward) for rank in ranks),
        buffer=tuple(_buffer(plan.forward, rank) for rank in ranks),
        kept=_rows([m for t in plan.kept for m in plan.forward[t].fetch], plan.ranks, "dst"),
        kept_keys=_rows(
            [m for t in plan.kept_keys for m in plan.forward[t].fetch], plan.ranks, "dst"
        ),
    )


def calls(plan: Plan, direction: Direction = "forward") -> tuple[tuple[int, ...], ...]:
    """Operator calls of each stage, one number for each rank."""
    programs = [program(plan, rank, direction) for rank in range(plan.ranks)]
    stages = range(len(programs[0].steps))
    return tuple(tuple(len(p.steps[stage].calls) for p in programs) for stage in stages)


def _rows(moves: Sequence[Move], ranks: int, side: str) -> tuple[int, ...]:
    rows = [0] * ranks
    for move in moves:
        rows[getattr(move, side)] += length(move.ranges)
    return tuple(rows)


def _buffer(stages: Sequence[Stage], rank: int) -> int:
    last = last_use(stages, rank)
    sizes = [sum(length(m.ranges) for m in stage.arriving(rank)) for stage in stages]
    return max(
        sum(
            size
            for size, stage, end in zip(sizes, stages, last, strict=True)
            if stage.posted <= t <= end
        )
        for t in range(len(stages))
    )
