"""What a recording of one step of one rank holds; plain data, for caches and other processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed.pipeline.schedule.checker import check
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

if TYPE_CHECKING:
    from mindspeed.planner.job import Overrides  # which imports Megatron


class Part(Enum):
    """A stretch of a step between two marks."""

    __hash__ = object.__hash__  # of Enum it is a function of Python's

    HEAD = "head"  # before gradients are zeroed
    CLEAR = "clear"  # the optimizer zeroes gradients
    OPEN = "open"  # until the first action
    PRE = "pre"  # a forward, or a pair, before its first layer
    LAYER = "layer"  # forward of a layer
    BOTH = "both"  # forward of a layer, and backward of a layer of another micro-batch
    POST = "post"  # a forward, or a pair, after its last layer
    BACK_POST = "back post"  # a backward, before the gradient of the last layer is known
    AGAIN = "again"  # a layer is computed once more
    BACK = "back"  # backward of a layer
    BACK_PRE = "back pre"  # a backward, after the first layer; or all of W and R
    GAP = "gap"  # between two actions
    END = "end"  # after the last action, before the optimizer's step
    UPDATE = "update"  # the optimizer's step
    CLOSE = "close"  # after it


BUILT = ("weights", "gradients", "main weights", "optimizer")
"""Kinds of memory that exist before the first forward, or that the optimizer makes."""
PER_LAYER = (Part.LAYER, Part.BOTH, Part.AGAIN, Part.BACK)
OF_LAYERS = (*PER_LAYER, Part.POST, Part.BACK_POST, Part.BACK_PRE)
"""Parts that free what layers keep, or whose operations are those of layers."""
AFTER = (Part.END, Part.UPDATE, Part.CLOSE)
BEFORE = (Part.HEAD, Part.CLEAR, Part.OPEN)
PER_STEP = (*BEFORE, *AFTER)


class Place(NamedTuple):
    """An action of the row of a rank.

    Attributes:
        op: as in :mod:`mindspeed.pipeline.schedule.actions`.
        chunk: model chunk of the rank.
        micro_batch: number of the micro-batch.
        paired: it is a backward that runs at the same time as the forward before it; its index is
            that of both.
    """

    op: str
    chunk: int
    micro_batch: int
    paired: bool = False


Row = tuple[Place, ...]


def row_of(request: ScheduleRequest, ranks: int, chunks: int, count: int, rank: int) -> Row:
    """Actions of a pipeline rank.

    Raises:
        ConfigError: the schedule does not exist for these sizes.
    """
    if ranks == 1:
        return tuple(Place(op, 0, number) for number in range(count) for op in "FB")
    return _rows(request, ranks, chunks, count)[rank]


# Large ones take megabytes, so few are kept.
_unchecked = lru_cache(maxsize=16)(partial(build_plan, checked=False))


@lru_cache(maxsize=16)
def planned_step(request: ScheduleRequest, ranks: int, chunks: int, count: int) -> Plan:
    """The plan of a step, built and checked once.

    Raises:
        ConfigError: the schedule does not exist for these sizes.
    """
    plan = _unchecked(request, ranks, chunks, count)
    check(plan, request.memory_limit, request.costs)
    return plan


@lru_cache(maxsize=256)
def _rows(request: ScheduleRequest, ranks: int, chunks: int, count: int) -> tuple[Row, ...]:
    # Rows are looked for among many; that of a recording is compared with what was executed.
    build = planned_step if request.memory_limit is not None else _unchecked
    plan = build(request, ranks, chunks, count)
    return tuple(
        tuple(
            Place(a.op, plan.placement.chunk(a.stage), a.microbatch, before in plan.paired)
            for before, a in zip((None, *row), row, strict=False)
            if a.op not in "GOL" and a.microbatch is not None
        )
        for row in plan.rows
    )


def actions_of(row: Sequence[Place]) -> Iterator[tuple[int, Place, Place | None]]:
    """Index of each action, the action, and the forward that runs at the same time, if any."""
    for action, place in enumerate(row):
        if action + 1 == len(row) or not row[action + 1].paired:
            yield action, place, row[action - 1] if place.paired else None


class Message(NamedTuple):
    """What is alike in communications that are summed; waits have no ``op``, nor have seconds of
    products of experts (:data:`EXPERT_PRODUCTS`), which are summed alike.

    Attributes:
        group: Megatron's description of the process group.
        size: its ranks.
        op: such as ``all_gather``, see :mod:`mindspeed.instruments.ledger`.
    """

    group: str
    size: int
    op: str

    @property
    def routed(self) -> bool:
        """Whether it takes longer on a rank to which more tokens are routed."""
        return "EXPERT" in self.group and "DATA_PARALLEL" not in self.group

    @property
    def shared(self) -> bool:
        """Whether data-parallel ranks communicate: once in a step, not in each micro-batch."""
        return "DATA_PARALLEL" in self.group


EXPERT_PRODUCTS = Message("EXPERT_PRODUCTS", 0, "")


class Traffic(NamedTuple):
    """Sums of communications, and seconds of waiting for them."""

    calls: int = 0
    payload: int = 0
    wire: int = 0
    waited: float = 0.0


Sent = dict[Message, Traffic]


def add(total: Sent, more: Sent, times: float = 1) -> None:
    """Add ``times`` so many communications to a sum."""
    for key, one in more.items():
        known = total.get(key, Traffic())
        total[key] = Traffic(*(a + times * b for a, b in zip(known, one, strict=True)))  # type: ignore[arg-type]


@dataclass
class Block:
    """Storages that are born, freed or resized from one mark to the next.

    Attributes:
        action: index in the row; -1 before the first, the length of the row after the last.
        part: which stretch it is.
        layer: layer of the chunk, for parts of layers.
        deltas: changes of the bytes alive, in order.
        kinds: kind of memory of each (:mod:`mindspeed.planner.count.step_counter`).
        flops: FLOPs, recomputation included.
        recomputed: FLOPs of recomputation.
        seconds: duration by the clock; 0 without one.
        sent: communications and waits.
        messages: indices of deltas by which layers free what was sent or received.
    """

    action: int
    part: Part
    layer: int = 0
    deltas: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    flops: int = 0
    recomputed: int = 0
    seconds: float = 0.0
    sent: Sent = field(default_factory=dict)
    messages: list[int] = field(default_factory=list)

    @property
    def net(self) -> int:
        """Change of the bytes alive."""
        return sum(self.deltas)

    @property
    def top(self) -> int:
        """The most bytes alive beyond those at its start."""
        return top_of(self.deltas)


def top_of(deltas: Iterable[int]) -> int:
    """Highest prefix sum, at least 0."""
    now = most = 0
    for delta in deltas:
        now += delta
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Point:
    """A rank to record.

    Attributes:
        overrides: flags of the small job.
        devices: number of its ranks.
        stage: pipeline rank.
        forward: whether micro-batches run; else gradients are zeroed and the optimizer steps.
        bare: whether layers only pass hidden states on (:mod:`mindspeed.planner.count.bare`).
        step: whether a step is recorded; else there are only the bytes after one.
    """

    overrides: Overrides
    devices: int
    stage: int
    forward: bool = True
    bare: bool = False
    step: bool = True


@dataclass(frozen=True)
class Recording:
    """One step of one rank.

    Attributes:
        row: executed actions.
        blocks: blocks, in order and without gaps.
        layers: number of layers of each chunk.
        static: bytes between steps, by kind.
        parameters: parameters on the rank.
        host: bytes of host memory between steps.
        peak: most bytes alive.
        at_peak: these, by kind.
    """

    row: tuple[Place, ...]
    blocks: tuple[Block, ...]
    layers: tuple[int, ...]
    static: Counter[str]
    parameters: int
    host: int
    peak: int
    at_peak: Counter[str]

    @property
    def shared(self) -> Sent:
        """Communications of data-parallel ranks."""
        total: Sent = {}
        for block in self.blocks:
            add(total, {name: sums for name, sums in block.sent.items() if name.shared})
        return total


def json_of(recording: Recording) -> dict[str, Any]:
    """A recording as JSON; kinds of memory and messages are numbered."""
    kinds = sorted({kind for block in recording.blocks for kind in block.kinds})
    numbers = {kind: number for number, kind in enumerate(kinds)}
    blocks = [
        [
            *(one.action, one.part.value, one.layer, one.deltas),
            [numbers[kind] for kind in one.kinds],
            *(one.flops, one.recomputed, one.seconds),
            [[*name, *sums] for name, sums in one.sent.items()],
            one.messages,
        ]
        for one in recording.blocks
    ]
    found = {name: getattr(recording, name) for name in _PLAIN}
    return found | {"kinds": kinds, "blocks": blocks}


_PLAIN = ("row", "layers", "static", "parameters", "host", "peak", "at_peak")


def recording_of(values: Mapping[str, Any]) -> Recording:
    """A recording from its JSON."""
    kinds = values["kinds"]
    blocks = []
    for action, part, layer, deltas, of, flops, again, seconds, rows, messages in values["blocks"]:
        sent = {Message(*row[:3]): Traffic(*row[3:]) for row in rows}
        names = [kinds[number] for number in of]
        blocks.append(
            Block(action, Part(part), layer, deltas, names, flops, again, seconds, sent, messages)
        )
    return Recording(
        tuple(Place(*place) for place in values["row"]),
        tuple(blocks),
        tuple(values["layers"]),
        Counter(values["static"]),
        values["parameters"],
        values["host"],
        values["peak"],
        Counter(values["at_peak"]),
    )
