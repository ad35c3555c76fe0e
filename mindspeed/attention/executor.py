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
from mindspeed.attention.accumulate import KeyGradients, PartialOutputs, QueryGradients, with_sink
from mindspeed.attention.plan import OWN, Plan, kept
from mindspeed.attention.program import Direction, Program, Transfer, program
from mindspeed.attention.transport import Post, Steps
from mindspeed.attention.wire import KeyValueShape, pack

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
        self.program = _compiled(self.plan, self.rank, self.direction, self.softmax)
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
        over = [buffer for buffer in self.program.steps[number].ends if buffer in self.buffers]
        return {buffer: self.buffers.pop(buffer) for buffer in over}


def _compiled(plan: Plan, rank: int, direction: Direction, softmax: kernels.Softmax) -> Program:
    return program(plan, rank, direction, positions=softmax.slopes is not None)


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
    if (only := _compiled(plan, rank, "forward", softmax).only) is not None:
        traffic.calls += 1
        out, lse = kernels.forward(q, k, v, only.pack, softmax)
        return *with_sink(out, lse, sink), {}
    here = _Traveller(plan, rank, "forward", pack(k, v), shape, q.flatten(1), softmax, traffic)
    own, saved = PartialOutputs.start(q, v.shape[2], softmax.fused_merge), {}
    returning = None
    for number, step in enumerate(here.program.steps):
        yield from here.begin(number)
        work = {OWN: own}
        if here.asked is not None:
            theirs = here.asked.unflatten(1, q.shape[1:])
            work[ASKED] = PartialOutputs.start(theirs, v.shape[2], softmax.fused_merge)
        for call in step.calls:
            keys, values = shape.unpack(call.columns.take(here.buffers[call.keys]))
            target = work[call.queries]
            part = kernels.forward(call.rows.take(target.q), keys, values, call.pack, softmax)
            target.merge(call.rows, *part, first=call.first)
        traffic.calls += len(step.calls)
        if returning is not None:
            own.take(here.program.steps[number - 1], (yield returning))
        returning = None
        if step.ask is not None:
            done = work[ASKED]
            rows = pack(done.out.to(q.dtype), done.lse)
            returning = yield here.post(_home(step.ask), rows, home=True)
        for buffer, rows in here.end(number).items():
            if buffer in plan.kept:
                saved[buffer] = rows
            elif buffer in plan.kept_keys:
                saved[buffer] = rows[:, : shape.border].clone()
    if returning is not None:
        own.take(here.program.steps[-1], (yield returning))
    out, lse = own.with_sink(sink)
    return out.to(q.dtype), lse, saved


def _home(ask: Transfer) -> Transfer:
    return ask.returned(ask.tag + 2)


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
    if (only := _compiled(plan, rank, "backward", softmax).only) is not None:
        traffic.calls += 1
        dq, dk, dv = kernels.backward(dout, q, k, v, out, lse, only.pack, softmax)
        return dq, dk, dv
    travels = any(stage.queries for stage in plan.backward)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) if travels else lse
    here = _Traveller(
        plan, rank, "backward", pack(k, v), shape, pack(q, dout, lse, delta) if travels else q,
        softmax, traffic, saved,
    )  # fmt: skip
    sums = KeyGradients(lse.new_zeros(k.shape[0], shape.width), shape, here.program.sums, k.dtype)
    own = QueryGradients(dout, q, out, lse)
    giving = returning = None
    for number, step in enumerate(here.program.steps):
        yield from here.begin(number)
        work = {OWN: own}
        if here.asked is not None:
            work[ASKED] = QueryGradients.arrived(here.asked, own)
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
