"""What a plan costs, as exact integers: pairs, rows, messages, buffers.

The executor counts the same while it runs, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.attention.layout import length
from mindspeed.attention.plan import Move, Plan, Stage


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
        return self.groups * (self.head_size + self.value_size) * self.itemsize


@dataclass(frozen=True)
class Figures:
    """Costs of a plan, one number for each rank.

    Attributes:
        area: Pairs computed.
        fetched: Rows of keys and values received in the forward pass.
        refetched: The same in the backward pass.
        given: Rows of gradients sent in the backward pass.
        messages: Messages received, both passes.
        calls: Parts of the mask computed in the forward pass.
        buffer: Most rows of other ranks held at a time in the forward pass.
    """

    area: tuple[int, ...]
    fetched: tuple[int, ...]
    refetched: tuple[int, ...]
    given: tuple[int, ...]
    messages: tuple[int, ...]
    calls: tuple[int, ...]
    buffer: tuple[int, ...]

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


def figures(plan: Plan) -> Figures:
    """Price a plan."""
    ranks = range(plan.ranks)
    both = (*plan.forward, *plan.backward)
    return Figures(
        area=tuple(sum(r.area() for s in plan.forward for r in s.work[rank]) for rank in ranks),
        fetched=_rows([m for s in plan.forward for m in s.fetch], plan.ranks, "dst"),
        refetched=_rows([m for s in plan.backward for m in s.fetch], plan.ranks, "dst"),
        given=_rows([m for s in plan.backward for m in s.give], plan.ranks, "src"),
        messages=tuple(
            sum(m.dst == rank for s in both for m in (*s.fetch, *s.give)) for rank in ranks
        ),
        calls=tuple(sum(len(s.work[rank]) for s in plan.forward) for rank in ranks),
        buffer=tuple(_buffer(plan.forward, rank) for rank in ranks),
    )


def _rows(moves: Sequence[Move], ranks: int, side: str) -> tuple[int, ...]:
    rows = [0] * ranks
    for move in moves:
        rows[getattr(move, side)] += length(move.ranges)
    return tuple(rows)


def last_use(stages: Sequence[Stage], rank: int) -> list[int]:
    """For each stage, the last stage at which what arrived then is worked on or sent on."""
    last = list(range(len(stages)))
    for stage in stages:
        for move in stage.fetch:
            if move.src == rank and move.buffer >= 0:
                last[move.buffer] = max(last[move.buffer], stage.posted)
    return last


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
