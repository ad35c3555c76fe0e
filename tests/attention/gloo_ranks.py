"""Jobs for the ranks of ``test_context_parallel``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import (
    HeadAllToAll,
    Mask,
    Plan,
    SequenceSharding,
    Sizes,
    WrongPlanError,
    context_parallel_attention,
    contiguous,
    cost_metrics,
    executor,
    planners,
    zigzag,
)
from mindspeed.attention.executor import RankTraffic
from mindspeed.attention.sequence_sharding import union
from mindspeed.attention.ulysses_attention import ulysses_attention
from mindspeed.instruments import CommLedger, saved_for_backward
from tests.support import truth

SIZE, SCALE = 48, 0.3
PLANNERS = {
    "ring": planners.ring,
    "double ring": lambda mask, sharding: planners.ring(mask, sharding, sharding.ranks // 2),
    "all-gather": planners.all_gather,
    "needed only": lambda mask, sharding: planners.needed_only(mask, sharding, 3),
    "mesh": lambda mask, sharding: planners.mesh(mask, sharding, 2),
}
CACHES = {"ring": "half", "needed only": "full", "mesh": "half"}


def _whole(parts: torch.Tensor, sharding: SequenceSharding) -> torch.Tensor:
    gathered: list[Any] = [None] * sharding.ranks
    dist.all_gather_object(gathered, parts)
    order = torch.cat([sharding.positions(rank) for rank in range(sharding.ranks)]).argsort()
    return torch.cat(gathered)[order]


def _errors(
    sharding: SequenceSharding, leaves: list[torch.Tensor], out: Any, expected: Any
) -> list[float]:
    results = [out.detach(), *(x.grad for x in leaves)]
    return [
        float((_whole(got, sharding) - wanted).abs().max())
        for got, wanted in zip(results, expected, strict=True)
    ]


def algorithms(documents: tuple[int, ...]) -> dict[str, tuple[float, bool]]:
    """For every algorithm: largest error, and whether the plan's bytes are those that travelled."""
    mask, found = Mask.documents(documents), {}
    *qkv, dout = truth.tensors(SIZE)
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    sharding = zigzag(SIZE, dist.get_world_size())
    second = dist.new_group()
    for name, make in PLANNERS.items():
        plan = make(mask, sharding)
        found[name] = _algorithm(plan, qkv, dout, expected, None)
        if name in CACHES:
            plan = planners.with_cache(plan, CACHES[name])
            found[f"{name}, cached"] = _algorithm(plan, qkv, dout, expected, second)
    return found


def _algorithm(plan: Plan, qkv: Any, dout: Any, expected: Any, second: Any) -> tuple[float, bool]:
    rank = dist.get_rank()
    rows, traffic = plan.sharding.positions(rank), RankTraffic()
    leaves = [x[rows].requires_grad_() for x in qkv]
    out = context_parallel_attention(
        *leaves, plan, overlap_group=second, scale=SCALE, traffic=traffic
    )
    out.backward(dout[rows])
    price, sizes = cost_metrics(plan), Sizes(4, 2, 8, 6, 8)
    planned = price.forward_bytes(sizes)[rank] + price.backward_bytes(sizes)[rank]
    return max(_errors(plan.sharding, leaves, out, expected)), traffic.received == planned


def disagreement() -> str:
    """Ranks with different documents, whose plans exchange equally much."""
    mask = Mask.documents((0, 10 + dist.get_rank(), SIZE))
    plan = planners.all_gather(mask, zigzag(SIZE, dist.get_world_size()))
    x = torch.zeros(SIZE // 2, 1, 8)
    try:
        context_parallel_attention(x, x, x, plan)
    except WrongPlanError as error:
        return str(error)
    return "ran"


def failing_rank() -> str:
    """The last rank fails in the middle of the work and leaves."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plan = planners.needed_only(Mask.causal(SIZE), zigzag(SIZE, world))
    x = torch.zeros(SIZE // world, 1, 8)
    if rank == world - 1:
        executor.kernels.forward = _fails
    try:
        context_parallel_attention(x, x, x, plan)
        dist.barrier()
    except Exception as error:
        if rank == world - 1:
            dist.destroy_process_group()
        return str(error)
    return "went on"


def _fails(*_: Any) -> Any:
    raise MemoryError("out of memory in the kernel")


CASES = [(48, 8, 4), (48, 4, 2), (48, 4, 1), (45, 6, 3), (47, 7, 7), (46, 5, 1), (48, 14, 2)]
"""Lengths, query heads, key heads."""


def every_ulysses() -> dict[Any, float]:
    """Largest error for some lengths and heads, without and with a plan for those left over."""
    return {(*case, rest): max(_ulysses(*case, rest)) for case in CASES for rest in (False, True)}


def _ulysses(size: int, heads: int, groups: int, rest: bool) -> list[float]:
    *qkv, dout = truth.tensors(size, heads, groups)
    world, rank = dist.get_world_size(), dist.get_rank()
    sharding, mask = contiguous(size, world), Mask.causal(size)
    split = HeadAllToAll(sharding, rank, dist.group.WORLD)
    rows = sharding.positions(rank)
    leaves = [x[rows].requires_grad_() for x in qkv]
    slopes = torch.linspace(0, 0.2, heads, dtype=torch.float64)
    local = planners.ring(mask, contiguous(size, 1))
    out = ulysses_attention(
        *leaves, split, local, scale=SCALE, slopes=slopes,
        rest=planners.mesh(mask, sharding, 2) if rest else None,
    )  # fmt: skip
    out.backward(dout[rows])
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE, slopes=slopes)
    return _errors(sharding, leaves, out, expected)


def ulysses_cache() -> list[Any]:
    """For every policy: gradients, bytes sent in each pass, collectives, bytes saved."""
    size, heads, groups = 64, 8, 2
    *qkv, dout = truth.tensors(size, heads, groups, 8, 8)
    rank = dist.get_rank()
    sharding = zigzag(size, dist.get_world_size())
    split = HeadAllToAll(sharding, rank, dist.group.WORLD)
    rows, local = sharding.positions(rank), planners.ring(Mask.causal(size), contiguous(size, 1))
    found = []
    for policy in (None, "half", "full"):
        leaves = [x[rows].requires_grad_() for x in qkv]
        with CommLedger() as ledger, saved_for_backward() as saved:
            out = ulysses_attention(*leaves, split, local, scale=SCALE, cache=policy)
            out.backward(dout[rows])
        sent = [ledger.wire_bytes("all_to_all", phase=p) for p in ("forward", "backward")]
        grads = [x.grad.tolist() for x in leaves]
        found.append((grads, sent, ledger.calls("all_to_all"), saved.bytes))
    return found


def hybrid(inner: int) -> list[float]:
    """All-to-all of heads in Ulysses groups, a ring among these groups."""
    *qkv, dout = truth.tensors(SIZE)
    world, rank = dist.get_world_size(), dist.get_rank()
    sharding, mask = zigzag(SIZE, world), Mask.causal(SIZE)
    outer = world // inner
    mine, member = divmod(rank, inner)
    ulysses = [dist.new_group(range(u * inner, (u + 1) * inner)) for u in range(outer)]
    rings = [dist.new_group(range(p, world, inner)) for p in range(inner)]
    members = [sharding.segments[u * inner : (u + 1) * inner] for u in range(outer)]
    split = HeadAllToAll(SequenceSharding(members[mine]), member, ulysses[mine])
    merged = SequenceSharding(
        tuple(union(part for own in group for part in own) for group in members)
    )
    plan = planners.ring(mask, merged)
    rows = sharding.positions(rank)
    leaves = [x[rows].requires_grad_() for x in qkv]
    out = context_parallel_attention(*split.to_heads(*leaves), plan, rings[member], scale=SCALE)
    out = split.to_sequence(out, qkv[0].shape[1])
    out.backward(dout[rows])
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    return _errors(sharding, leaves, out, expected)


def dropout() -> tuple[float, float, float]:
    """Share of dropped probabilities, and errors of the gradients against finite differences."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sharding = zigzag(SIZE, world)
    plan = planners.ring(Mask.causal(SIZE), sharding)
    *qkv, dout = truth.tensors(SIZE)
    rows = sharding.positions(rank)
    leaves = [x[rows].requires_grad_() for x in qkv]

    def loss(*mine: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7 + rank)
        out = context_parallel_attention(*mine, plan, scale=SCALE, dropout=0.25)
        return (out * dout[rows]).sum()

    loss(*leaves).backward()
    direction = [torch.randn_like(x) for x in leaves]
    analytic = sum((x.grad * d).sum() for x, d in zip(leaves, direction, strict=True))
    step = 1e-5
    with torch.no_grad():
        up = loss(*(x + step * d for x, d in zip(leaves, direction, strict=True)))
        down = loss(*(x - step * d for x, d in zip(leaves, direction, strict=True)))
        torch.manual_seed(7 + rank)
        ones = torch.ones_like(leaves[2])
        kept = context_parallel_attention(
            leaves[0], leaves[1], ones, plan, scale=SCALE, dropout=0.25
        )
    both = torch.stack([analytic, (up - down) / (2 * step)])
    dist.all_reduce(both)
    return float(kept.mean()), float(both[0]), float(both[1])


def wrong_sizes() -> list[str]:
    """Messages of calls that do not fit."""
    plan = planners.ring(Mask.causal(8), contiguous(8, 2))
    other = planners.ring(Mask.causal(8), contiguous(8, 4))
    good = torch.zeros(4, 2, 8)
    messages = []
    for q, k, v, given in (
        (torch.zeros(3, 2, 8), good, good, plan),
        (good, good[:, :, :4], good, plan),
        (torch.zeros(4, 3, 8), good, good, plan),
        (good, good, good, other),
    ):
        try:
            context_parallel_attention(q, k, v, given)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages
