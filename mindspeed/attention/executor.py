"""Executes a plan: the forward and the backward pass of one rank, as generators.

Every rank holds rows ``[t, n, d]`` in the order of its sharding. While a stage computes, the rows
of the next one are sent. Partial outputs are merged by their log-sum-exp and gradients of own rows
are accumulated, both in fp32, in the order of the plan and never of arrival, so that a run is
reproducible bit for bit.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.attention import kernels
from mindspeed.attention.communication import Exchange, ExchangeGenerator, PackedKVShape, pack
from mindspeed.attention.compiled_plan import CompiledPlan, Direction, RankExchange
from mindspeed.attention.merge import KVGradients, PartialOutputs, QueryGradients, with_sink
from mindspeed.attention.plan import OWN, Plan, saved_buffer
from mindspeed.attention.plan_compiler import RECEIVED_QUERIES, compile_plan


@dataclass
class RankTraffic:
    """Bytes one rank received and sent, messages, operator calls; equal to the cost metrics."""

    received: int = 0
    sent: int = 0
    messages: int = 0
    calls: int = 0

    def count(self, exchange: Exchange) -> None:
        row = exchange.rows.shape[1] * exchange.rows.itemsize
        self.sent += sum(rows for _, rows in exchange.sends) * row
        self.received += sum(rows for _, rows in exchange.receives) * row
        self.messages += len(exchange.receives)


@dataclass
class _RankState:
    """Buffers and pending exchanges of one rank during a pass.

    Attributes:
        own_kv: Own keys and values, packed ``[t, width]``.
        q: What is sent of own queries, packed ``[t, columns]``.
        saved: Of the forward pass, by stage.
        received_q: What other ranks sent of their queries for the current stage.
    """

    plan: Plan
    rank: int
    direction: Direction
    own_kv: torch.Tensor
    shape: PackedKVShape
    q: torch.Tensor
    softmax: kernels.SoftmaxOptions
    traffic: RankTraffic
    saved: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compiled = _compiled(self.plan, self.rank, self.direction, self.softmax)
        k_buffers = {saved_buffer(stage) for stage in self.plan.saved_k}
        saved = {saved_buffer(stage): rows for stage, rows in self.saved.items()}
        self.saved_k = {buffer: saved.pop(buffer) for buffer in k_buffers if buffer in saved}
        self.buffers: dict[int, torch.Tensor] = {OWN: self.own_kv, **saved}
        self.received_q: torch.Tensor | None = None
        self._handles: dict[tuple[int, str], Any] = {}

    def begin(self, number: int) -> Generator[Any, Any, None]:
        """Wait for the exchanges of a stage and start those of later stages."""
        stage = self.compiled.stages[number]
        self.received_q = None
        if stage.kv is not None:
            rows = yield self._handles.pop((number, "kv"))
            if stage.saved_keys is not None:
                rows = torch.cat((self.saved_k[stage.saved_keys], rows), 1)
            self.buffers[number] = rows
        if stage.q is not None:
            self.received_q = yield self._handles.pop((number, "q"))
        for later in stage.starts:
            other = self.compiled.stages[later]
            if other.kv is not None:
                source = self.buffers[other.kv.buffer]
                if self.direction == "backward" and self.plan.backward[later].values_only:
                    source = source[:, self.shape.key_width :]
                handle = yield self.exchange(other.kv, other.kv.send_rows.select(source))
                self._handles[later, "kv"] = handle
            if other.q is not None:
                rows = other.q.send_rows.select(self.q)
                self._handles[later, "q"] = yield self.exchange(other.q, rows)

    def exchange(
        self, exchange: RankExchange, rows: torch.Tensor, *, to_owner: bool = False
    ) -> Exchange:
        """The request to yield to start an exchange of ``rows`` ``[rows, columns]``."""
        started = Exchange(
            exchange.tag, exchange.collective, rows, exchange.sends, exchange.receives, to_owner
        )
        self.traffic.count(started)
        return started

    def pop_unused(self, number: int) -> dict[int, torch.Tensor]:
        """Pop and return the buffers whose last use was this stage."""
        unused = [b for b in self.compiled.stages[number].frees if b in self.buffers]
        return {buffer: self.buffers.pop(buffer) for buffer in unused}


def _compiled(
    plan: Plan, rank: int, direction: Direction, softmax: kernels.SoftmaxOptions
) -> CompiledPlan:
    return compile_plan(plan, rank, direction, positions=softmax.slopes is not None)


def forward(
    plan: Plan,
    rank: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax: kernels.SoftmaxOptions,
    sink: torch.Tensor | None = None,
    traffic: RankTraffic | None = None,
) -> ExchangeGenerator[tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]]:
    """The forward pass of one rank.

    Args:
        plan: Of all ranks.
        rank: This rank.
        q: Own queries ``[t, n, d]``.
        k: Own keys ``[t, g, d]``.
        v: Own values ``[t, g, d_v]``.
        softmax: Scale, bias and dropout; pass the same object to :func:`backward`.
        sink: Score of a key without a value, ``[n]``.
        traffic: Counts what is sent and received.

    Returns:
        Output ``[t, n, d_v]`` in the dtype of q, log-sum-exp ``[t, n]`` in the wide dtype, and by
        stage what is saved for backward: packed keys and values ``[rows, width]``, or keys.
    """
    shape, traffic = PackedKVShape.of(k, v), traffic or RankTraffic()
    if (only := _compiled(plan, rank, "forward", softmax).single_call) is not None:
        traffic.calls += 1
        out, lse = kernels.forward(q, k, v, only.batch, softmax)
        return *with_sink(out, lse, sink), {}
    state = _RankState(plan, rank, "forward", pack(k, v), shape, q.flatten(1), softmax, traffic)
    own, saved = PartialOutputs.empty(q, v.shape[2], softmax.fused_merge), {}
    returning: Any = None  # handle of the outputs of own queries that other ranks computed
    for number, stage in enumerate(state.compiled.stages):
        yield from state.begin(number)
        outputs = {OWN: own}
        if state.received_q is not None:
            received = state.received_q.unflatten(1, q.shape[1:])
            outputs[RECEIVED_QUERIES] = PartialOutputs.empty(
                received, v.shape[2], softmax.fused_merge
            )
        for call in stage.calls:
            keys, values = shape.unpack(call.k_rows.select(state.buffers[call.keys]))
            target = outputs[call.queries]
            queries = call.q_rows.select(target.q)
            part = kernels.forward(queries, keys, values, call.batch, softmax)
            target.merge(call.q_rows, *part, first=call.first)
        traffic.calls += len(stage.calls)
        if returning is not None:
            own.merge_received(_q(state, number - 1), (yield returning))
        returning = None
        if stage.q is not None:
            done = outputs[RECEIVED_QUERIES]
            rows = pack(done.out.to(q.dtype), done.lse)
            returning = yield state.exchange(_results_of(stage.q), rows, to_owner=True)
        for buffer, rows in state.pop_unused(number).items():
            if buffer in plan.saved_kv:
                saved[buffer] = rows
            elif buffer in plan.saved_k:
                saved[buffer] = rows[:, : shape.key_width].clone()
    if returning is not None:
        own.merge_received(_q(state, -1), (yield returning))
    out, lse = own.with_sink(sink)
    return out.to(q.dtype), lse, saved


def _q(state: _RankState, number: int) -> RankExchange:
    exchange = state.compiled.stages[number].q
    assert exchange is not None
    return exchange


def _results_of(q: RankExchange) -> RankExchange:
    return q.reversed(q.tag + 2)


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
    softmax: kernels.SoftmaxOptions,
    traffic: RankTraffic | None = None,
) -> ExchangeGenerator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The backward pass of one rank.

    Args:
        plan: Of all ranks.
        rank: This rank.
        dout: Gradient of the output ``[t, n, d_v]``.
        q: Own queries ``[t, n, d]``.
        k: Own keys ``[t, g, d]``.
        v: Own values ``[t, g, d_v]``.
        out: Output of the forward pass ``[t, n, d_v]``.
        lse: Log-sum-exp of the forward pass ``[t, n]``.
        saved: What the forward pass saved.
        softmax: The object of the forward pass.
        traffic: Counts what is sent and received.

    Returns:
        Gradients of q ``[t, n, d]``, k ``[t, g, d]`` and v ``[t, g, d_v]``, in their dtypes.
    """
    shape, traffic = PackedKVShape.of(k, v), traffic or RankTraffic()
    if (only := _compiled(plan, rank, "backward", softmax).single_call) is not None:
        traffic.calls += 1
        dq, dk, dv = kernels.backward(dout, q, k, v, out, lse, only.batch, softmax)
        return dq, dk, dv
    sends_q = any(stage.q for stage in plan.backward)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) if sends_q else lse
    state = _RankState(
        plan, rank, "backward", pack(k, v), shape, pack(q, dout, lse, delta) if sends_q else q,
        softmax, traffic, saved,
    )  # fmt: skip
    dkv = KVGradients(
        lse.new_zeros(k.shape[0], shape.width), shape, state.compiled.gradient_rows, k.dtype
    )
    own = QueryGradients(dout, q, out, lse)
    sending_dkv: Any = None  # handles of what is on the way to the owners
    returning: Any = None
    for number, stage in enumerate(state.compiled.stages):
        yield from state.begin(number)
        gradients = {OWN: own}
        if state.received_q is not None:
            gradients[RECEIVED_QUERIES] = QueryGradients.of_received(state.received_q, own)
        for call in stage.calls:
            keys, values = shape.unpack(call.k_rows.select(state.buffers[call.keys]))
            target = gradients[call.queries]
            dout_, q_, out_, lse_ = (
                call.q_rows.select(x) for x in (target.dout, target.q, target.out, target.lse)
            )
            dq, dk, dv = kernels.backward(dout_, q_, keys, values, out_, lse_, call.batch, softmax)
            call.q_rows.add_to(target.dq, dq)
            dkv.add(call.keys, call.k_rows, dk, dv)
        traffic.calls += len(stage.calls)
        if sending_dkv is not None:
            dkv.add_received(state.compiled.stages[number - 1], (yield sending_dkv))
        if returning is not None:
            own.add_received(_q(state, number - 1), (yield returning))
        sending_dkv = returning = None
        if stage.dkv is not None:
            sending_dkv = yield state.exchange(stage.dkv, dkv.to_send(stage.dkv), to_owner=True)
        if stage.q is not None:
            rows = gradients[RECEIVED_QUERIES].dq.to(q.dtype).flatten(1)
            returning = yield state.exchange(_results_of(stage.q), rows, to_owner=True)
        state.pop_unused(number)
    if sending_dkv is not None:
        dkv.add_received(state.compiled.stages[-1], (yield sending_dkv))
    if returning is not None:
        own.add_received(_q(state, -1), (yield returning))
    dk, dv = shape.unpack(dkv.of(OWN))
    return own.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
