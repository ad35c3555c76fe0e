"""Compiles a plan for one rank and one pass.

Three questions are answered ahead of time, so that the executor only follows orders: which rows of
which buffer are sent and computed with, which regions share an operator call, and in which buffer
the gradients of other ranks' keys and values are accumulated until they are sent on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mindspeed.attention.compiled_plan import (
    ZEROS,
    CompiledPlan,
    Direction,
    RankExchange,
    RankStage,
    RowIndex,
    VarlenCall,
)
from mindspeed.attention.mask import Region
from mindspeed.attention.plan import (
    OWN,
    Plan,
    Stage,
    Transfer,
    last_use,
    received_by,
    saved_buffer,
    sent_by,
)
from mindspeed.attention.sequence_sharding import PositionIndex, length
from mindspeed.attention.varlen_batches import varlen_batches

RECEIVED_QUERIES = 0
"""Buffer of the queries received in a stage."""


def compile_plan(
    plan: Plan, rank: int, direction: Direction, *, positions: bool = False
) -> CompiledPlan:
    """Compile a pass for a rank; cached in the plan.

    Args:
        plan: All ranks and stages.
        rank: This rank.
        direction: The pass.
        positions: The operator needs the positions of queries and keys (ALiBi), which restricts
            what one call may contain.

    Raises:
        KeyError: A row is not in the buffer in which the plan expects it;
            :func:`mindspeed.attention.check` gives a readable message.
    """
    key = (rank, direction, positions)
    if key not in plan.derived:
        plan.derived[key] = _PlanCompiler(plan, rank, direction, positions).compile()
    return plan.derived[key]  # type: ignore[no-any-return]


def attention_calls(
    stage: Stage, rank: int, buffers: dict[int, PositionIndex], positions: bool = False
) -> tuple[VarlenCall, ...]:
    """The operator calls of a rank in a stage; ``buffers`` hold its keys and own queries."""
    received = PositionIndex([part for t in stage.q_to(rank) for part in t.ranges])
    queries = {OWN: buffers[OWN], RECEIVED_QUERIES: received}
    by_buffers: dict[tuple[int, int], list[Region]] = {}
    for region in stage.work[rank]:
        q_buffer = _buffer_with((region.q0, region.q1), queries)
        k_buffer = _buffer_with((region.k0, region.k1), buffers)
        by_buffers.setdefault((q_buffer, k_buffer), []).append(region)
    return tuple(
        VarlenCall(
            batch,
            q_buffer,
            RowIndex(queries[q_buffer].slices((s.q0, s.q1) for s in batch.sequences)),
            k_buffer,
            RowIndex(buffers[k_buffer].slices(part for s in batch.sequences for part in s.keys)),
        )
        for (q_buffer, k_buffer), regions in by_buffers.items()
        for batch in varlen_batches(regions, positions=positions)
    )


def _buffer_with(wanted: tuple[int, int], buffers: dict[int, PositionIndex]) -> int:
    for number, rows in buffers.items():
        if rows.has([wanted]):
            return number
    raise KeyError(f"positions {wanted[0]} to {wanted[1] - 1} are in no buffer")


def _mark_first_calls(stages: list[RankStage]) -> None:
    """Set ``first`` where no output of the queries exists; received queries are new per stage."""
    own_seen: list[RowIndex] = []
    answered = False  # other ranks may have computed outputs of any own query
    for stage in stages:
        received_seen: list[RowIndex] = []
        marked = []
        for call in stage.calls:
            own = call.queries == OWN
            seen = own_seen if own else received_seen
            known = (own and answered) or any(call.q_rows.overlaps(rows) for rows in seen)
            marked.append(replace(call, first=not known))
            seen.append(call.q_rows)
        stage.calls = tuple(marked)
        answered = answered or stage.q is not None


class _PlanCompiler:
    def __init__(self, plan: Plan, rank: int, direction: Direction, positions: bool) -> None:
        self.plan, self.rank, self.positions = plan, rank, positions
        self.stages: Sequence[Stage] = getattr(plan, direction)
        self.own = PositionIndex(plan.sharding.segments[rank])
        self.arrived = [_positions(stage.kv_to(rank)) for stage in self.stages]
        self.saved_kv: dict[int, PositionIndex] = {}
        self.saved_k: dict[int, PositionIndex] = {}
        if direction == "backward":
            for stages, found in ((plan.saved_kv, self.saved_kv), (plan.saved_k, self.saved_k)):
                for stage in stages:
                    found[saved_buffer(stage)] = _positions(plan.forward[stage].kv_to(rank))
        self.gradients: dict[int, PositionIndex] = {OWN: self.own}  # accumulated dkv, by buffer
        self.gradient_rows = {OWN: self.own.rows}

    def compile(self) -> CompiledPlan:
        stages = [self.stage(number) for number in range(len(self.stages))]
        _mark_first_calls(stages)
        if self.plan.ranks > 1:
            self.route_gradients(stages)
        return CompiledPlan(stages, self.gradient_rows)

    def stage(self, number: int) -> RankStage:
        stage = self.stages[number]
        buffers = {OWN: self.own, number: self.arrived[number], **self.saved_kv}
        last = last_use(self.stages, self.rank)
        return RankStage(
            self.exchange(stage.kv, 4 * number, self.source),
            self.exchange(stage.q, 4 * number + 1, lambda _: (OWN, self.own)),
            self.keys_of_values(number) if stage.values_only else None,
            tuple(
                later
                for later, other in enumerate(self.stages)
                if (other.kv or other.q) and other.posted == number
            ),
            attention_calls(stage, self.rank, buffers, self.positions),
            frees=tuple(buffer for buffer, end in enumerate(last) if end == number),
        )

    def source(self, transfer: Transfer) -> tuple[int, PositionIndex]:
        """The buffer from which keys and values are sent, and its positions."""
        number = transfer.buffer
        if number == OWN:
            return OWN, self.own
        return number, self.saved_kv[number] if number < 0 else self.arrived[number]

    def exchange(
        self,
        transfers: Sequence[Transfer],
        tag: int,
        source: Callable[[Transfer], tuple[int, PositionIndex]],
    ) -> RankExchange | None:
        if not transfers:
            return None
        busiest = Counter(t.src for t in transfers) | Counter(t.dst for t in transfers)
        sent, received = sent_by(transfers, self.rank), received_by(transfers, self.rank)
        sources = [source(transfer) for transfer in sent]
        slices = [list(rows.slices(t.ranges)) for (_, rows), t in zip(sources, sent, strict=True)]
        buffers = {buffer for buffer, _ in sources}
        if len(buffers) > 1:
            raise KeyError(f"rank {self.rank} sends from several buffers at a time: {sent}")
        by_peer: dict[int, list[slice]] = {}
        for transfer, parts in zip(sent, slices, strict=True):
            by_peer.setdefault(transfer.dst, []).extend(parts)
        receives = Counter[int]()
        for transfer in received:
            receives[transfer.src] += length(transfer.ranges)
        rows_by_peer = tuple(RowIndex(parts) for parts in by_peer.values())
        return RankExchange(
            tag,
            max(busiest.values()) > 1,
            buffers.pop() if buffers else OWN,
            RowIndex(part for parts in by_peer.values() for part in parts),
            tuple((peer, index.rows) for peer, index in zip(by_peer, rows_by_peer, strict=True)),
            tuple(receives.items()),
            rows_by_peer,
        )

    def keys_of_values(self, number: int) -> int | None:
        """The buffer of saved keys that has the order of the values that arrive."""
        arrived = self.arrived[number]
        if not arrived.rows:
            return None
        for buffer, rows in self.saved_k.items():
            if rows.ranges == arrived.ranges:
                return buffer
        raise KeyError(f"rank {self.rank} has not kept the keys that fit the values of {number}")

    def route_gradients(self, stages: list[RankStage]) -> None:
        """Decide where dkv is accumulated: computed here, added to what arrives, then sent on."""
        next_number = ZEROS - 1
        before: RankStage | None = None
        for number, (compiled, stage) in enumerate(zip(stages, self.stages, strict=True)):
            for call in compiled.calls:
                if call.keys not in self.gradients:
                    rows = self.saved_kv.get(call.keys)
                    self.gradients[call.keys] = self.arrived[call.keys] if rows is None else rows
            if before is not None and before.dkv is not None:
                next_number = self.receive_gradients(before, self.stages[number - 1], next_number)
            if stage.dkv:
                sent = [self.holder(t.ranges) for t in sent_by(stage.dkv, self.rank)]
                compiled.dkv = self.exchange(stage.dkv, 4 * number + 2, self.gradient_source)
                for buffer in {buffer for buffer in sent if buffer not in (None, OWN)}:
                    self.gradient_rows[buffer] = self.gradients.pop(buffer).rows
            before = compiled
        if before is not None and before.dkv is not None:
            self.receive_gradients(before, self.stages[-1], next_number)
        self.gradient_rows |= {buffer: rows.rows for buffer, rows in self.gradients.items()}

    def gradient_source(self, transfer: Transfer) -> tuple[int, PositionIndex]:
        """The buffer from which gradients are sent, and its positions."""
        holder = self.holder(transfer.ranges)
        if holder is None:
            return ZEROS, PositionIndex(transfer.ranges)
        return holder, self.gradients[holder]

    def receive_gradients(self, compiled: RankStage, stage: Stage, next_number: int) -> int:
        """Find or make the buffers to which received gradients are added; the next free number."""
        targets: list[tuple[int, RowIndex]] = []
        for transfer in received_by(stage.dkv, self.rank):
            own = self.own.has(transfer.ranges)
            holder = OWN if own else self.holder(transfer.ranges)
            if holder is None:
                holder, next_number = next_number, next_number - 1
                self.gradients[holder] = PositionIndex(transfer.ranges)
            targets.append((holder, RowIndex(self.gradients[holder].slices(transfer.ranges))))
        compiled.dkv_targets = tuple(targets)
        return next_number

    def holder(self, ranges: Iterable[tuple[int, int]]) -> int | None:
        """The buffer that accumulates the gradients of another rank's rows, if there is one."""
        others = ((buffer, rows) for buffer, rows in self.gradients.items() if buffer != OWN)
        return next((buffer for buffer, rows in others if rows.has(ranges)), None)


def _positions(transfers: Iterable[Transfer]) -> PositionIndex:
    return PositionIndex([part for transfer in transfers for part in transfer.ranges])
