"""Costs of a plan, as exact integers: pairs computed, rows sent, messages, rows in buffers.

The executor counts the same quantities while it runs (:class:`~.executor.Traffic`), and a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.attention.compiled_plan import Direction
from mindspeed.attention.plan import Plan, Stage, Transfer, last_use
from mindspeed.attention.plan_compiler import compile_plan
from mindspeed.attention.sequence_sharding import length


@dataclass(frozen=True)
class Sizes:
    """Sizes of q, k and v on one tensor-parallel rank.

    Attributes:
        heads: Query heads, n.
        groups: Key and value heads, g.
        head_size: Head dimension of queries and keys, d.
        value_size: Head dimension of values, d_v.
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
        """Bytes of one statistic (lse or delta) of every head, in fp32 (fp64 for fp64 inputs)."""
        return self.heads * max(self.itemsize, 4)


@dataclass(frozen=True)
class CostMetrics:
    """Costs of a plan, one number per rank; kv counts rows of keys and values, q rows of queries.

    Attributes:
        area: Query-key pairs computed.
        kv_received: Received in the forward pass.
        kv_received_backward: Received in the backward pass, keys and values.
        v_received_backward: Received in the backward pass, only values.
        dkv_sent: Gradients of keys and values sent.
        dkv_received: Gradients of keys and values received.
        q_received: Queries received, in each pass.
        q_sent: Queries sent; for each a result returns, in each pass.
        messages: Messages received, both passes.
        regions: Mask regions computed in the forward pass.
        kv_buffered: Most rows of other ranks held at the same time in the forward pass.
        kv_saved: Rows of other ranks saved for backward.
        k_saved: Rows of other ranks of which only the keys are saved.
    """

    area: tuple[int, ...]
    kv_received: tuple[int, ...]
    kv_received_backward: tuple[int, ...]
    v_received_backward: tuple[int, ...]
    dkv_sent: tuple[int, ...]
    dkv_received: tuple[int, ...]
    q_received: tuple[int, ...]
    q_sent: tuple[int, ...]
    messages: tuple[int, ...]
    regions: tuple[int, ...]
    kv_buffered: tuple[int, ...]
    kv_saved: tuple[int, ...]
    k_saved: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean over largest area; 1 is perfect, attention takes 1 / balance of the ideal time."""
        return sum(self.area) / len(self.area) / max(max(self.area), 1)

    def forward_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes received in the forward pass."""
        result = sizes.output_row + sizes.statistics_row
        return tuple(
            kv * sizes.row + q_received * sizes.query_row + q_sent * result
            for kv, q_received, q_sent in zip(
                self.kv_received, self.q_received, self.q_sent, strict=True
            )
        )

    def backward_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes received in the backward pass."""
        query = sizes.query_row + sizes.output_row + 2 * sizes.statistics_row
        return tuple(
            (kv + dkv) * sizes.row
            + v * sizes.value_row
            + q_received * query
            + q_sent * sizes.query_row
            for kv, dkv, v, q_received, q_sent in zip(
                self.kv_received_backward,
                self.dkv_received,
                self.v_received_backward,
                self.q_received,
                self.q_sent,
                strict=True,
            )
        )

    def saved_bytes(self, sizes: Sizes) -> tuple[int, ...]:
        """Bytes of other ranks' keys and values saved for the backward pass."""
        rows = zip(self.kv_saved, self.k_saved, strict=True)
        return tuple(kv * sizes.row + k * sizes.key_row for kv, k in rows)


def cost_metrics(plan: Plan) -> CostMetrics:
    ranks = range(plan.ranks)
    forward, back = plan.forward, plan.backward
    dkv = [t for s in back for t in s.dkv]
    q = [t for s in forward for t in s.q]
    every = [t for s in (*forward, *back) for t in (*s.kv, *s.dkv, *s.q)]
    results = [t.src for s in (*forward, *back) for t in s.q]

    def rows(transfers: Sequence[Transfer], side: str = "dst") -> tuple[int, ...]:
        return _rows(transfers, plan.ranks, side)

    return CostMetrics(
        area=tuple(sum(r.area() for s in forward for r in s.work[rank]) for rank in ranks),
        kv_received=rows([t for s in forward for t in s.kv]),
        kv_received_backward=rows([t for s in back if not s.values_only for t in s.kv]),
        v_received_backward=rows([t for s in back if s.values_only for t in s.kv]),
        dkv_sent=rows(dkv, "src"),
        dkv_received=rows(dkv),
        q_received=rows(q),
        q_sent=rows(q, "src"),
        messages=tuple(sum(t.dst == rank for t in every) + results.count(rank) for rank in ranks),
        regions=tuple(sum(len(s.work[rank]) for s in forward) for rank in ranks),
        kv_buffered=tuple(_buffered(forward, rank) for rank in ranks),
        kv_saved=rows([t for number in plan.saved_kv for t in forward[number].kv]),
        k_saved=rows([t for number in plan.saved_k for t in forward[number].kv]),
    )


def calls_per_stage(plan: Plan, direction: Direction = "forward") -> tuple[tuple[int, ...], ...]:
    """Operator calls of each stage, one number per rank."""
    compiled = [compile_plan(plan, rank, direction) for rank in range(plan.ranks)]
    stages = range(len(compiled[0].stages))
    return tuple(tuple(len(one.stages[stage].calls) for one in compiled) for stage in stages)


def _rows(transfers: Sequence[Transfer], ranks: int, side: str) -> tuple[int, ...]:
    rows = [0] * ranks
    for transfer in transfers:
        rows[getattr(transfer, side)] += length(transfer.ranges)
    return tuple(rows)


def _buffered(stages: Sequence[Stage], rank: int) -> int:
    last = last_use(stages, rank)
    sizes = [sum(length(t.ranges) for t in stage.kv_to(rank)) for stage in stages]
    return max(
        sum(
            size
            for size, stage, end in zip(sizes, stages, last, strict=True)
            if stage.posted <= number <= end
        )
        for number in range(len(stages))
    )
