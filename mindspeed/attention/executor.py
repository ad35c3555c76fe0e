"""Run a plan: one rank's forward and backward pass as generators.

Every rank holds rows ``[t, n, d]`` in the order of its layout. While the work of a stage runs, the
next rows travel. Partial outputs are merged by their log-sum-exp and gradients of a rank's own rows
are added up, both in fp32, in the order of the plan and never in that of arrival: a run can be
repeated bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.attention import kernels
from mindspeed.attention.wire import KeyValueShape, pack, unpack
from mindspeed.attention.plan import OWN, Plan, kept
from mindspeed.attention.program import ZEROS, Direction, Program, Step, Transfer, program
from mindspeed.attention.rows import Index
from mindspeed.attention.transport import Post, Steps

ASKED = 0
"""Buffer of the queries that arrived in a stage."""


@dataclass
class Traffic:
    """What one rank received and sent, and its operator calls; compared with the plan's figures."""

    received: int = 0
    sent: int = 0
    messages: int = 0
    calls: int = 0

    def count(self, post: Post) -> None:
        """Add an exchange; bytes."""
        row = post.rows.shape[1] * post.rows.itemsize
        self.sent += sum(rows for _, rows in post.sends) * row
        self.received += sum(rows for _, rows in post.receives) * row
        self.messages += len(post.receives)


@dataclass
class _Queries:
    """Queries in a buffer, and what has been computed of them so far."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def start(cls, q: torch.Tensor, value_size: int) -> _Queries:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:2], value_size, dtype=wide)
        return cls(q, out, q.new_full(q.shape[:2], float("-inf"), dtype=wide))

    def merge(self, rows: Index, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        """Add a partial softmax to some rows."""
        out, lse = rows.take(self.out), rows.take(self.lse)
        both = torch.logaddexp(lse, part_lse)
        # Where neither has seen a key, both weights are exp(-inf) = 0.
        least = both.masked_fill(both == float("-inf"), 0.0)
        out = out.mul_((lse - least).exp_().unsqueeze(-1))
        out.addcmul_(part.to(out.dtype), (part_lse - least).exp_().unsqueeze(-1))
        if rows.together is None:
            rows.put(self.out, out)
        rows.put(self.lse, both)


@dataclass
class _Traveller:
    """One rank on its way through a pass: its buffers and exchanges."""

    plan: Plan
    rank: int
    direction: Direction
    own: torch.Tensor  # packed keys and values
    shape: KeyValueShape
    queries: torch.Tensor  # packed
    softmax: kernels.Softmax
    traffic: Traffic
    saved: dict[int, torch.Tensor] = field(default_factory=dict)  # of the forward pass, by stage

    def __post_init__(self) -> None:
        positions = self.softmax.slopes is not None
        self.program: Program = program(self.plan, self.rank, self.direction, positions=positions)
        kept_keys = {kept(stage) for stage in self.plan.kept_keys}
        saved = {kept(stage): rows for stage, rows in self.saved.items()}
        self.kept_keys = {buffer: saved.pop(buffer) for buffer in kept_keys if buffer in saved}
        self.buffers: dict[int, torch.Tensor] = {OWN: self.own, **saved}
        self.asked: torch.Tensor | None = None
        self._tickets: dict[tuple[int, bool], Any] = {}

    def begin(self, number: int) -> Generator[Any, Any, None]:
        """Wait for what a step works with and start what later ones need."""
        step = self.program.steps[number]
        self.asked = None
        if step.fetch is not None:
            rows = yield self._tickets.pop((number, False))
            if step.keys is not None:
                rows = torch.cat((self.kept_keys[step.keys], rows), 1)
            self.buffers[number] = rows
        if step.ask is not None:
            self.asked = yield self._tickets.pop((number, True))
        for later in step.starts:
            other = self.program.steps[later]
            if other.fetch is not None:
                source = self.buffers[other.fetch.buffer]
                if self.direction == "backward" and self.values_only(later):
                    source = source[:, self.shape.border :]
                ticket = yield self.post(other.fetch, other.fetch.take.take(source))
                self._tickets[later, False] = ticket
            if other.ask is not None:
                rows = other.ask.take.take(self.queries)
                self._tickets[later, True] = yield self.post(other.ask, rows)

    def values_only(self, number: int) -> bool:
        return self.plan.backward[number].values_only

    def post(self, transfer: Transfer, rows: torch.Tensor, *, home: bool = False) -> Post:
        post = Post(
            transfer.tag, transfer.collective, rows, transfer.sends, transfer.receives, home
        )
        self.traffic.count(post)
        return post

    def end(self, number: int) -> dict[int, torch.Tensor]:
        """Let go of buffers that no later step needs; which ones."""
        return {buffer: self.buffers.pop(buffer) for buffer in self.program.steps[number].ends
                if buffer in self.buffers}  # fmt: skip


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
        backward pass: packed keys and values, or keys, by stage.
    """
    shape, traffic = KeyValueShape.of(k, v), traffic or Traffic()
    here = _Traveller(
        plan, rank, "forward", pack(k, v), shape, q.flatten(1), softmax, traffic
    )  # fmt: skip
    own, saved = _Queries.start(q, v.shape[2]), {}
    returning = None
    for number, step in enumerate(here.program.steps):
        yield from here.begin(number)
        work = {OWN: own}
        if here.asked is not None:
            work[ASKED] = _Queries.start(here.asked.unflatten(1, q.shape[1:]), v.shape[2])
        for call in step.calls:
            keys, values = shape.unpack(call.columns.take(here.buffers[call.keys]))
            target = work[call.queries]
            part = kernels.forward(call.rows.take(target.q), keys, values, call.pack, softmax)
            target.merge(call.rows, *part)
        traffic.calls += len(step.calls)
        if returning is not None:
            _take_results(here.program.steps[number - 1], own, (yield returning))
        returning = None
        if step.ask is not None:
            theirs = work[ASKED]
            rows = pack(theirs.out.to(q.dtype), theirs.lse)
            returning = yield here.post(_home(step.ask), rows, home=True)
        for buffer, rows in here.end(number).items():
            if buffer in plan.kept:
                saved[buffer] = rows
            elif buffer in plan.kept_keys:
                saved[buffer] = rows[:, : shape.border].clone()
    if returning is not None:
        _take_results(here.program.steps[-1], own, (yield returning))
    out, lse = own.out, own.lse
    if sink is not None:
        with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
        out.mul_((lse - with_sink).exp_().unsqueeze(-1))
        lse = with_sink
    return out.to(q.dtype), lse, saved


def _home(ask: Transfer) -> Transfer:
    return ask.returned(ask.tag + 2)


def _take_results(step: Step, own: _Queries, received: torch.Tensor) -> None:
    """Merge what others computed of a rank's own queries."""
    assert step.ask is not None
    dtypes = own.q.dtype, own.lse.dtype
    part, lse = unpack(received, (own.out.shape[1:], dtypes[0]), (own.lse.shape[1:], dtypes[1]))
    sizes = [index.rows for index in step.ask.parts]
    for index, *parts in zip(step.ask.parts, part.split(sizes), lse.split(sizes), strict=True):
        own.merge(index, *parts)


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
    shape, traffic = KeyValueShape.of(k, v), traffic or Traffic()
    travels = any(stage.queries for stage in plan.backward)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) if travels else lse
    here = _Traveller(
        plan, rank, "backward", pack(k, v), shape, pack(q, dout, lse, delta) if travels else q,
        softmax, traffic, saved,
    )  # fmt: skip
    sums = _Sums(here, lse.new_zeros(k.shape[0], shape.width))
    own = _Outputs(dout, q, out, lse)
    giving = returning = None
    for number, step in enumerate(here.program.steps):
        yield from here.begin(number)
        work = {OWN: own}
        if here.asked is not None:
            work[ASKED] = _Outputs.arrived(here.asked, own)
        for call in step.calls:
            keys, values = shape.unpack(call.columns.take(here.buffers[call.keys]))
            target = work[call.queries]
            dout_, q_, out_, lse_ = (
                call.rows.take(x) for x in (target.dout, target.q, target.out, target.lse)
            )
            dq, dk, dv = kernels.backward(dout_, q_, keys, values, out_, lse_, call.pack, softmax)
            call.rows.add(target.dq, dq)
            sums.add(call.keys, call.columns, dk, dv)
        traffic.calls += len(step.calls)
        before = here.program.steps[number - 1]
        if giving is not None:
            sums.take(before, (yield giving))
        if returning is not None:
            own.take(before, (yield returning))
        giving = returning = None
        if step.give is not None:
            giving = yield here.post(step.give, sums.give(step.give), home=True)
        if step.ask is not None:
            rows = work[ASKED].dq.to(q.dtype).flatten(1)
            returning = yield here.post(_home(step.ask), rows, home=True)
        here.end(number)
    if giving is not None:
        sums.take(here.program.steps[-1], (yield giving))
    if returning is not None:
        own.take(here.program.steps[-1], (yield returning))
    dk, dv = shape.unpack(sums.of(OWN))
    return own.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass
class _Outputs:
    """Queries with their final output, and the sum of their gradients."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        self.dq = torch.zeros_like(self.q, dtype=self.lse.dtype)

    @classmethod
    def arrived(cls, rows: torch.Tensor, own: _Outputs) -> _Outputs:
        narrow, wide = own.q.dtype, own.lse.dtype
        heads = own.lse.shape[1:]
        q, dout, lse, delta = unpack(
            rows, (own.q.shape[1:], narrow), (own.dout.shape[1:], narrow), (heads, wide),
            (heads, wide),
        )  # fmt: skip
        return cls(dout, q, kernels.stand_in(dout, delta), lse)

    def take(self, step: Step, received: torch.Tensor) -> None:
        """Add the gradients that others computed."""
        assert step.ask is not None
        sizes = [index.rows for index in step.ask.parts]
        parts = received.unflatten(1, self.q.shape[1:]).split(sizes)
        for index, part in zip(step.ask.parts, parts, strict=True):
            index.add(self.dq, part)


class _Sums:
    """Sums of gradients of keys and values: of a rank's own rows, and of others' on their way."""

    def __init__(self, here: _Traveller, own: torch.Tensor) -> None:
        self.here = here
        self._sums = {OWN: own}

    def of(self, buffer: int) -> torch.Tensor:
        """The sums of the rows in a buffer."""
        if buffer not in self._sums:
            rows = self.here.program.sums[buffer]
            self._sums[buffer] = self._sums[OWN].new_zeros(rows, self.here.shape.width)
        return self._sums[buffer]

    def add(self, buffer: int, rows: Index, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients of some rows."""
        if rows.together is None:
            rows.add(self.of(buffer), torch.cat((dk.flatten(1), dv.flatten(1)), 1))
            return
        for total, part in zip(
            self.here.shape.unpack(rows.take(self.of(buffer))), (dk, dv), strict=True
        ):
            total += part

    def give(self, transfer: Transfer) -> torch.Tensor:
        """Rows to send further, in the dtype of the keys."""
        like = self.here.own
        if transfer.buffer == ZEROS or not transfer.sends:
            return like.new_zeros(transfer.take.rows, self.here.shape.width)
        return transfer.take.take(self._sums.pop(transfer.buffer)).to(like.dtype)

    def take(self, step: Step, received: torch.Tensor) -> None:
        """Add what others sent after a step."""
        parts = received.split([index.rows for _, index in step.taken])
        for (buffer, index), part in zip(step.taken, parts, strict=True):
            index.add(self.of(buffer), part)
