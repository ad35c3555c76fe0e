"""``context_parallel_attention``: attention over a sequence that is sharded over ranks.

    sharding = zigzag(S, P)                                   # the tokens of every rank
    plan = ring(Mask.causal(S), sharding)                     # planned once
    out = context_parallel_attention(q, k, v, plan, group)  # rows of this rank in and out

With Ulysses (:mod:`~mindspeed.attention.ulysses_attention`) this runs between the two all-to-alls,
and the plan is that of the outer ranks.

A plan is verified before its first use: cheap always, in full with ``MINDSPEED_CHECK_PLAN=1``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import executor
from mindspeed.attention.check import WrongPlanError, check, check_area
from mindspeed.attention.communication import run_on_group
from mindspeed.attention.kernels import SoftmaxOptions
from mindspeed.attention.plan import Plan
from mindspeed.attention.ulysses_all_to_all import KVBeforeAllToAll
from mindspeed.errors import ConfigError
from mindspeed.spmd import Arguments, Collective, V, typed


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
    kv_cache: KVBeforeAllToAll | None = None,
    fused_merge: bool = False,
    traffic: executor.RankTraffic | None = None,
) -> torch.Tensor:
    """Attend as the plan says. Collective over the group, in forward and backward.

    Saved for backward: q, k, v, the output, its log-sum-exp ``[t, n]``, and the keys and values of
    other ranks that the plan saves. :mod:`mindspeed.attention.cost_metrics` gives the bytes sent.

    Args:
        q: This rank's queries ``[t, n, d]``, in the order of the plan's sharding.
        k: This rank's keys ``[t, g, d]``; g divides n.
        v: This rank's values ``[t, g, d_v]``.
        plan: The same on all ranks.
        group: The ranks of the plan; None for the default group.
        overlap_group: A second group of the same ranks, over which dkv and results return to their
            owners while keys and values arrive (``--use-cp-send-recv-overlap``); None for
            ``group``.
        scale: Factor on the scores; by default ``1 / sqrt(d)``.
        slopes: ALiBi ``[n]``: ``-slope * |i - j|`` is added to the scaled scores.
        sink: Score of a key without a value, ``[n]``; its gradient is that of this rank's queries.
        dropout: Dropout rate of the probabilities; each rank draws its own random numbers.
        kv_cache: Save keys and values as they were before an all-to-all, and repeat the all-to-all
            in backward (:meth:`HeadAllToAll.kv_cache`).
        fused_merge: Merge partial outputs with :mod:`mindspeed.ops.npu_ring_attention_update`, one
            pass over them instead of two (not in fp64).
        traffic: Counts bytes and messages, for tests and benchmarks.

    Returns:
        ``[t, n, d_v]`` in the dtype of q.

    Raises:
        ConfigError: Sizes do not fit the plan.
        WrongPlanError: The plan does not compute its mask; it was not executed. With
            ``MINDSPEED_CHECK_PLAN=1`` plans are proven in full and compared between ranks.
    """
    world = 1 if plan.ranks == 1 else dist.get_world_size(group)
    rank = 0 if plan.ranks == 1 else dist.get_rank(group)
    if world != plan.ranks:
        raise ConfigError(f"the plan is for {plan.ranks} ranks, the group has {world}")
    _check_shapes(q, k, v, plan, rank)
    verify(plan, group, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softmax = SoftmaxOptions(scale, slopes, dropout, fused_merge)
    run = _Invocation(plan, rank, (group, overlap_group), softmax, kv_cache, traffic)
    return _Attention.apply(q, k, v, sink, run)  # type: ignore[no-any-return]


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, rank: int) -> None:
    rows = sum(b - a for a, b in plan.sharding.segments[rank])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != rows:
            raise ConfigError(
                f"{name} is [{', '.join(map(str, x.shape))}], must be [{rows}, heads, head size]: "
                f"rank {rank} of the sharding owns {rows} rows"
            )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"heads and head sizes of q {tuple(q.shape[1:])}, k {tuple(k.shape[1:])} and v "
            f"{tuple(v.shape[1:])} do not fit: as many key as value heads, which divide the query "
            "heads, and equal head sizes of q and k"
        )


@dataclass(frozen=True)
class _Invocation:
    plan: Plan
    rank: int
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]
    softmax: SoftmaxOptions
    kv_cache: KVBeforeAllToAll | None
    traffic: executor.RankTraffic | None


def _ring(given: Arguments) -> Any:
    run = given["run"]
    return run.groups[0] if run.plan.ranks > 1 else None


@typed(Collective(V, V, tensor=("q", "k", "v"), group=_ring, operands=("sink",)))
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        run: _Invocation,
    ) -> torch.Tensor:
        steps = executor.forward(
            run.plan, run.rank, q, k, v, softmax=run.softmax, sink=sink, traffic=run.traffic
        )
        out, lse, saved = run_on_group(steps, *run.groups)
        if run.kv_cache is not None:
            k, v = run.kv_cache.k, v if run.kv_cache.v is None else run.kv_cache.v
        ctx.save_for_backward(q, k, v, sink, out, lse, *saved.values())
        ctx.run = (
            run if run.kv_cache is None else replace(run, kv_cache=run.kv_cache.without_tensors())
        )
        ctx.stages = tuple(saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        run: _Invocation = ctx.run
        q, k, v, sink, out, lse, *others = ctx.saved_tensors
        if run.kv_cache is not None:
            k, v = run.kv_cache.after_all_to_all(k, v)
        saved, (dout,) = dict(zip(ctx.stages, others, strict=True)), grads
        steps = executor.backward(
            run.plan, run.rank, dout, q, k, v, out, lse, saved,
            softmax=run.softmax, traffic=run.traffic,
        )  # fmt: skip
        dqkv, dsink = run_on_group(steps, *run.groups), None
        if sink is not None:
            share = (sink.to(lse.dtype) - lse).exp()
            dsink = -(share * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0)
            dsink = dsink.to(sink.dtype)
        return (*dqkv, dsink, None)


CHECK_PLAN = "MINDSPEED_CHECK_PLAN"


def verify(plan: Plan, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuse a plan that does not compute its mask.

    Always compares the number of query-key pairs, once per plan. With ``MINDSPEED_CHECK_PLAN=1``
    also proves the plan once, and compares its digest between the ranks at every call. That
    comparison is an all-gather of 32 bytes and cannot be skipped for a plan seen before: a rank
    does not know whether the other ranks have seen it.

    Args:
        plan: The plan about to be executed.
        group: The ranks of the plan.
        device: Device of the tensors of the all-gather.

    Raises:
        WrongPlanError: The plan is wrong, or the ranks have different plans.
    """
    thorough = os.environ.get(CHECK_PLAN) == "1"
    if thorough and plan.ranks > 1:
        _compare_digests(plan, group, device)
    if verify not in plan.derived:
        (check if thorough else check_area)(plan)
        plan.derived[verify] = True


def _compare_digests(plan: Plan, group: Any, device: torch.device) -> None:
    own = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(plan.ranks)]
    dist.all_gather(gathered, own, group=group)
    digests = [bytes(digest.tolist()).hex() for digest in gathered]
    if other := next((digest for digest in digests if digest != digests[0]), None):
        raise WrongPlanError(
            f"plans differ between CP ranks: {digests[0][:12]} vs {other[:12]} "
            "(same cu_seqlens on every rank?)"
        )
