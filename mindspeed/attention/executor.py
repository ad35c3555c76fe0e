"""Run a plan: one rank's forward and backward pass as generators.

Every rank holds rows ``[t, n, d]`` in the order of its layout. While the work of a stage runs, the
next rows travel. Partial outputs are merged by their log-sum-exp and gradients of a rank's own rows
are added up, both in fp32, in the order of the plan and never in that of arrival: a run can be
repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.attention import kernels
from mindspeed.attention.figures import last_use
from mindspeed.attention.layout import Ranges, Rows
from mindspeed.attention.mask import Region
from mindspeed.attention.plan import OWN, Move, Plan, Stage
from mindspeed.attention.transport import Post, Steps

_TAGS_PER_STAGE = 2

Shapes = list[tuple[int, tuple[int, ...]]]


@dataclass
class Held:
    """Rows of keys and values in one tensor, so that they travel as one message."""

    rows: Rows
    packed: torch.Tensor

    def take(self, ranges: Ranges) -> torch.Tensor:
        """Some of the rows."""
        return torch.cat([self.packed[rows] for rows in self.rows.slices(ranges)])


@dataclass(frozen=True)
class KeyValueShape:
    """Sizes of keys and values, which lie behind each other in a packed row."""

    groups: int
    head_size: int
    value_size: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> KeyValueShape:
        """From ``[t, g, d]`` and ``[t, g, d_v]``."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def width(self) -> int:
        """Elements of a packed row."""
        return self.groups * (self.head_size + self.value_size)

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[t, g, d]`` and ``[t, g, d_v]``."""
        border = self.groups * self.head_size
        k, v = packed[:, :border], packed[:, border:]
        return k.unflatten(1, (self.groups, -1)), v.unflatten(1, (self.groups, -1))


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values as rows of one tensor."""
    return torch.cat((k.flatten(1), v.flatten(1)), 1)


@dataclass
class Traffic:
    """What one rank received and sent; counted to be compared with the plan's figures."""

    received: int = 0
    sent: int = 0
    messages: int = 0

    def count(self, post: Post) -> None:
        """Add an exchange; bytes."""
        self.sent += sum(tensor.nbytes for _, tensor in post.sends)
        for _, (rows, width) in post.receives:
            self.received += rows * width * post.like.itemsize
            self.messages += 1


@dataclass
class _Pass:
    """Buffers of one pass on one rank."""

    plan: Plan
    rank: int
    stages: tuple[Stage, ...]
    own: Held
    shape: KeyValueShape
    traffic: Traffic
    saved: dict[int, Held] = field(default_factory=dict)  # of the forward pass, by stage
    buffers: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_use = last_use(self.stages, self.rank)

    def posts(self, stage: int) -> Iterator[tuple[int, Post]]:
        """Exchanges that start with a stage."""
        for number, later in enumerate(self.stages):
            if later.fetch and later.posted == stage:
                sends = [
                    (m.dst, self.source(m).take(m.ranges))
                    for m in later.fetch
                    if m.src == self.rank
                ]
                receives: Shapes = [
                    (m.src, (Rows(m.ranges).rows, self.shape.width))
                    for m in later.arriving(self.rank)
                ]
                post = Post(number * _TAGS_PER_STAGE, sends, receives, self.own.packed)
                self.traffic.count(post)
                yield number, post

    def source(self, move: Move) -> Held:
        if move.buffer == OWN:
            return self.own
        return self.buffers[move.buffer] if move.buffer >= 0 else self.saved[-2 - move.buffer]

    def receive(self, stage: int, parts: list[torch.Tensor]) -> None:
        moves = self.stages[stage].arriving(self.rank)
        if moves:
            ranges = [part for move in moves for part in move.ranges]
            packed = parts[0] if len(parts) == 1 else torch.cat(parts)
            self.buffers[stage] = Held(Rows(ranges), packed)

    def forget(self, stage: int, keep: tuple[int, ...] = ()) -> None:
        """Let go of buffers that no later stage sends on."""
        for number, last in enumerate(self._last_use):
            if last <= stage and number not in keep:
                self.buffers.pop(number, None)

    def keys_of(self, region: Region, stage: int) -> tuple[Held, slice]:
        """Where the keys of a region lie: among a rank's own, those just arrived, or kept ones."""
        for held in (self.own, self.buffers.get(stage), *self.saved.values()):
            if held is not None:
                try:
                    return held, next(held.rows.slices([(region.k0, region.k1)]))
                except KeyError:
                    continue
        raise KeyError(f"stage {stage}: rank {self.rank} has no keys for {region}")


def forward(
    plan: Plan,
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax: kernels.Softmax,
    sink: torch.Tensor | None = None,
    traffic: Traffic | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]]:
    """The forward pass.

    Args:
        plan: What to do.
        rank: This rank.
        q: Its queries ``[t, n, d]``.
        k: Its keys ``[t, g, d]``.
        v: Its values ``[t, g, d_v]``.
        softmax: Scale, bias and dropout; the backward pass needs the object of the forward pass.
        sink: ``[n]`` score of a key without a value.
        traffic: Counts what travels.

    Returns:
        Output ``[t, n, d_v]`` in the dtype of q, log-sum-exp ``[t, n]``, and what is kept for the
        backward pass: packed keys and values by stage.
    """
    queries = Rows(plan.layout.segments[rank])
    here = _Pass(
        plan, rank, plan.forward, Held(queries, pack(k, v)), KeyValueShape.of(k, v),
        traffic or Traffic(),
    )  # fmt: skip
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:2], v.shape[2], dtype=wide)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
    tickets: dict[int, Any] = {}
    for number, stage in enumerate(plan.forward):
        if number in tickets:
            here.receive(number, (yield tickets.pop(number)))
        for later, post in here.posts(number):
            tickets[later] = yield post
        for region in stage.work[rank]:
            held, cols = here.keys_of(region, number)
            keys, values = here.shape.unpack(held.packed[cols])
            rows = next(queries.slices([(region.q0, region.q1)]))
            part = kernels.forward(q[rows], keys, values, region, softmax)
            _merge(out[rows], lse[rows], *part)
        here.forget(number, plan.kept)
    saved = {stage: here.buffers[stage].packed for stage in plan.kept}
    if sink is not None:
        with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
        out.mul_((lse - with_sink).exp_().unsqueeze(-1))
        lse = with_sink
    return out.to(q.dtype), lse, saved


def backward(
    plan: Plan,
    rank: int,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: dict[int, torch.Tensor],
    *,
    softmax: kernels.Softmax,
    traffic: Traffic | None = None,
) -> Steps[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The backward pass: gradients of q, k and v.

    Args:
        plan: What to do.
        rank: This rank.
        dout: Gradient of the output.
        q: As in the forward pass.
        k: As in the forward pass.
        v: As in the forward pass.
        out: What the forward pass returned.
        lse: What the forward pass returned.
        saved: What the forward pass kept.
        softmax: Scale, bias and dropout; the backward pass needs the object of the forward pass.
        traffic: Counts what travels.
    """
    queries, shape = Rows(plan.layout.segments[rank]), KeyValueShape.of(k, v)
    here = _Pass(
        plan, rank, plan.backward, Held(queries, pack(k, v)), shape, traffic or Traffic(),
        {t: Held(_arrived(plan.forward[t], rank), packed) for t, packed in saved.items()},
    )  # fmt: skip
    dq = torch.zeros_like(q, dtype=lse.dtype)
    gradients = _Gradients(here, Held(queries, lse.new_zeros(k.shape[0], shape.width)))
    tickets: dict[int, Any] = {}
    returning = None
    for number, stage in enumerate(plan.backward):
        if number in tickets:
            here.receive(number, (yield tickets.pop(number)))
        for later, post in here.posts(number):
            tickets[later] = yield post
        for region in stage.work[rank]:
            held, cols = here.keys_of(region, number)
            keys, values = shape.unpack(held.packed[cols])
            dkeys, dvalues = shape.unpack(gradients.of(held).packed[cols])
            rows = next(queries.slices([(region.q0, region.q1)]))
            parts = kernels.backward(
                dout[rows], q[rows], keys, values, out[rows], lse[rows], region, softmax
            )
            for total, part in zip((dq[rows], dkeys, dvalues), parts, strict=True):
                total += part
        if returning is not None:
            gradients.add(number - 1, (yield returning))
        returning = None
        if stage.give:
            returning = yield gradients.give(number)
        here.forget(number)
    if returning is not None:
        gradients.add(len(plan.backward) - 1, (yield returning))
    dk, dv = shape.unpack(gradients.own.packed)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Gradients:
    """Sums of gradients of keys and values: of a rank's own rows, and of others' on their way."""

    def __init__(self, here: _Pass, own: Held) -> None:
        self.here, self.own = here, own
        self.foreign: list[Held] = []

    def of(self, held: Held) -> Held:
        """The sums of the rows in a buffer."""
        if held is self.here.own:
            return self.own
        for sums in self.foreign:
            if sums.rows.ranges == held.rows.ranges:
                return sums
        sums = Held(held.rows, self.own.packed.new_zeros(held.packed.shape))
        self.foreign.append(sums)
        return sums

    def give(self, stage: int) -> Post:
        """Send what is on its way further, in the dtype of the keys."""
        here, like = self.here, self.here.own.packed
        sends: list[tuple[int, torch.Tensor]] = []
        given: list[Held] = []
        for move in here.stages[stage].give:
            if move.src == here.rank:
                held = self._holding(move.ranges)
                if held is None:  # nobody here looked at these rows
                    rows = like.new_zeros(Rows(move.ranges).rows, like.shape[1])
                else:
                    rows = held.take(move.ranges).to(like.dtype)
                    given.append(held)
                sends.append((move.dst, rows))
        self.foreign = [held for held in self.foreign if all(held is not one for one in given)]
        receives: Shapes = [
            (move.src, (Rows(move.ranges).rows, like.shape[1]))
            for move in here.stages[stage].give
            if move.dst == here.rank
        ]
        post = Post(stage * _TAGS_PER_STAGE + 1, sends, receives, like)
        here.traffic.count(post)
        return post

    def add(self, stage: int, parts: list[torch.Tensor]) -> None:
        """Take in what others sent after a stage."""
        moves = [move for move in self.here.stages[stage].give if move.dst == self.here.rank]
        for move, part in zip(moves, parts, strict=True):
            held = self.own if _has(self.own, move.ranges) else self._holding(move.ranges)
            if held is None:
                self.foreign.append(Held(Rows(move.ranges), part.to(self.own.packed.dtype)))
                continue
            row = 0
            for rows in held.rows.slices(move.ranges):
                size = rows.stop - rows.start
                held.packed[rows] += part[row : row + size]
                row += size

    def _holding(self, ranges: Ranges) -> Held | None:
        return next((held for held in self.foreign if _has(held, ranges)), None)


def _has(held: Held, ranges: Ranges) -> bool:
    try:
        return all(rows is not None for rows in held.rows.slices(ranges))
    except KeyError:
        return False


def _arrived(stage: Stage, rank: int) -> Rows:
    return Rows([part for move in stage.arriving(rank) for part in move.ranges])


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add a partial softmax to the rows' result, in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)
