"""``context_parallel_attention``: attention over a sequence that is split over ranks.

    layout = zigzag(S, P)                                   # who owns which tokens
    plan = ring(Mask.causal(S), layout)                     # made once
    out = context_parallel_attention(q, k, v, plan, group)  # my rows in, my rows out

A :class:`HeadSplit` on top exchanges sequence for heads among neighbours (Ulysses); the plan then
is that of the remaining, outer ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import executor, transport
from mindspeed.attention.agreement import verify
from mindspeed.attention.kernels import Softmax
from mindspeed.attention.plan import Plan
from mindspeed.attention.ulysses import KeysAgain
from mindspeed.errors import ConfigError


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    *,
    overlap_group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout: float = 0.0,
    again: KeysAgain | None = None,
    fused_merge: bool = False,
    traffic: executor.Traffic | None = None,
) -> torch.Tensor:
    """Attend as the plan says. Collective over the group, forward and backward.

    Saved for backward: q, k, v, the output, its log-sum-exp ``[t, n]``, and what the plan keeps.

    Args:
        q: This rank's queries ``[t, n, d]``, in the order of the plan's layout.
        k: This rank's keys ``[t, g, d]``; g divides n.
        v: This rank's values ``[t, g, d_v]``.
        plan: Made by a planner, the same on all ranks.
        group: As many ranks as the plan has; None for the default group.
        overlap_group: The same ranks with a communicator of their own, for gradients that travel
            home while keys arrive (``--use-cp-send-recv-overlap``); None for the same one.
        scale: Factor on the scores; default ``1 / sqrt(d)``.
        slopes: ALiBi: ``[n]``, ``-slope * |i - j|`` is added to the scaled scores.
        sink: ``[n]`` score of a key without a value; gets a gradient from this rank's queries.
        dropout: Probability of dropping a probability; each rank draws its own.
        again: Keep keys and values as they were before an exchange of heads, and exchange them
            again in the backward pass (:meth:`HeadSplit.again`).
        fused_merge: Merge partial outputs by :mod:`mindspeed.ops.npu_ring_attention_update`, one
            pass over them instead of two (not in fp64).
        traffic: Counts what travels, for tests and benchmarks.

    Returns:
        ``[t, n, d_v]`` in the dtype of q.

    Raises:
        ConfigError: Sizes do not fit the plan.
        PlanError: The plan does not compute its mask; nothing was computed. With
            ``MINDSPEED_CHECK_PLAN=1`` plans are proven in full and compared between ranks.
    """
    world = 1 if plan.ranks == 1 else dist.get_world_size(group)
    rank = 0 if plan.ranks == 1 else dist.get_rank(group)
    if world != plan.ranks:
        raise ConfigError(f"the plan is for {plan.ranks} ranks, the group has {world}")
    _fits(q, k, v, plan, rank)
    verify(plan, group, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softmax = Softmax(scale, slopes, dropout, fused_merge)
    run = _Run(plan, rank, (group, overlap_group), softmax, again, traffic)
    return _Attention.apply(q, k, v, sink, run)  # type: ignore[no-any-return]


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, rank: int) -> None:
    rows = sum(b - a for a, b in plan.layout.segments[rank])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != rows:
            raise ConfigError(
                f"{name} is [{', '.join(map(str, x.shape))}], must be [{rows}, heads, head size]: "
                f"rank {rank} of the layout owns {rows} rows"
            )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"heads and head sizes of q {tuple(q.shape[1:])}, k {tuple(k.shape[1:])} and v "
            f"{tuple(v.shape[1:])} do not fit: as many key as value heads, which divide the query "
            "heads, and equal head sizes of q and k"
        )


@dataclass(frozen=True)
class _Run:
    plan: Plan
    rank: int
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
    softmax: Softmax
    again: KeysAgain | None
    traffic: executor.Traffic | None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        run: _Run,
    ) -> torch.Tensor:
        steps = executor.forward(
            run.plan, run.rank, q, k, v, softmax=run.softmax, sink=sink, traffic=run.traffic
        )
        out, lse, saved = transport.run(steps, *run.groups)
        if run.again is not None:
            k, v = run.again.k, v if run.again.v is None else run.again.v
        ctx.save_for_backward(q, k, v, sink, out, lse, *saved.values())
        ctx.run = run if run.again is None else replace(run, again=run.again.without_tensors())
        ctx.stages = tuple(saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        run: _Run = ctx.run
        q, k, v, sink, out, lse, *kept = ctx.saved_tensors
        if run.again is not None:
            k, v = run.again.exchanged(k, v)
        saved, (dout,) = dict(zip(ctx.stages, kept, strict=True)), grads
        steps = executor.backward(
            run.plan, run.rank, dout, q, k, v, out, lse, saved,
            softmax=run.softmax, traffic=run.traffic,
        )  # fmt: skip
        dqkv, dsink = transport.run(steps, *run.groups), None
        if sink is not None:
            share = (sink.to(lse.dtype) - lse).exp()
            dsink = -(share * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0)
            dsink = dsink.to(sink.dtype)
        return (*dqkv, dsink, None)
