"""What the ranks of ``test_parallel`` do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import (
    HeadSplit,
    Layout,
    Mask,
    Sizes,
    context_parallel_attention,
    contiguous,
    figures,
    planners,
    zigzag,
)
from mindspeed.attention.executor import Traffic
from mindspeed.attention.layout import length, union

from . import truth

SIZE, SCALE = 48, 0.3
PLANNERS = {
    "ring": planners.ring,
    "double ring": lambda mask, layout: planners.ring(mask, layout, 2),
    "all-gather": planners.all_gather,
    "needed only": lambda mask, layout: planners.needed_only(mask, layout, 3),
}


def _whole(parts: torch.Tensor, layout: Layout) -> torch.Tensor:
    gathered: list[Any] = [None] * layout.ranks
    dist.all_gather_object(gathered, parts)
    order = torch.cat([layout.positions(rank) for rank in range(layout.ranks)]).argsort()
    return torch.cat(gathered)[order]


def _errors(layout: Layout, leaves: list[torch.Tensor], out: Any, expected: Any) -> list[float]:
    results = [out.detach(), *(x.grad for x in leaves)]
    return [
        float((_whole(got, layout) - wanted).abs().max())
        for got, wanted in zip(results, expected, strict=True)
    ]


def algorithm(name: str, documents: tuple[int, ...]) -> tuple[list[float], bool]:
    """Errors of output and gradients, and whether the plan's bytes are those that travelled."""
    *qkv, dout = truth.tensors(SIZE)
    mask, rank = Mask.documents(documents), dist.get_rank()
    layout = zigzag(SIZE, dist.get_world_size())
    plan = PLANNERS[name](mask, layout)
    rows, traffic = layout.positions(rank), Traffic()
    leaves = [x[rows].requires_grad_() for x in qkv]
    out = context_parallel_attention(*leaves, plan, scale=SCALE, traffic=traffic)
    out.backward(dout[rows])
    price = figures(plan)
    returned = [m for stage in plan.backward for m in stage.give if m.dst == rank]
    expected_rows = price.fetched[rank] + price.refetched[rank]
    expected_rows += sum(length(move.ranges) for move in returned)
    counted = traffic.received == expected_rows * Sizes(4, 2, 8, 6, 8).row
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    return _errors(layout, leaves, out, expected), counted


def ulysses(size: int, heads: int, groups: int) -> list[float]:
    """All ranks exchange rows for heads; sizes need not divide."""
    *qkv, dout = truth.tensors(size, heads, groups)
    world, rank = dist.get_world_size(), dist.get_rank()
    layout = contiguous(size, world)
    split = HeadSplit(layout, rank, dist.group.WORLD)
    rows = layout.positions(rank)
    leaves = [x[rows].requires_grad_() for x in qkv]
    local = planners.ring(Mask.causal(size), contiguous(size, 1))
    out = context_parallel_attention(*split.split(*leaves), local, scale=SCALE)
    out = split.join(out, heads)
    out.backward(dout[rows])
    expected = truth.attend(*qkv, dout, Mask.causal(size).dense(), scale=SCALE)
    return _errors(layout, leaves, out, expected)


def hybrid(inner: int) -> list[float]:
    """Heads among neighbours, a ring among the groups of neighbours."""
    *qkv, dout = truth.tensors(SIZE)
    world, rank = dist.get_world_size(), dist.get_rank()
    layout, mask = zigzag(SIZE, world), Mask.causal(SIZE)
    outer = world // inner
    mine, place = divmod(rank, inner)
    neighbours = [dist.new_group(range(u * inner, (u + 1) * inner)) for u in range(outer)]
    rings = [dist.new_group(range(p, world, inner)) for p in range(inner)]
    members = [layout.segments[u * inner : (u + 1) * inner] for u in range(outer)]
    split = HeadSplit(Layout(members[mine]), place, neighbours[mine])
    merged = Layout(tuple(union(part for own in group for part in own) for group in members))
    plan = planners.ring(mask, merged)
    rows = layout.positions(rank)
    leaves = [x[rows].requires_grad_() for x in qkv]
    out = context_parallel_attention(*split.split(*leaves), plan, rings[place], scale=SCALE)
    out = split.join(out, qkv[0].shape[1])
    out.backward(dout[rows])
    expected = truth.attend(*qkv, dout, mask.dense(), scale=SCALE)
    return _errors(layout, leaves, out, expected)


def dropout() -> tuple[float, float, float]:
    """Share of dropped probabilities, and errors of the gradients against finite differences."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = zigzag(SIZE, world)
    plan = planners.ring(Mask.causal(SIZE), layout)
    *qkv, dout = truth.tensors(SIZE)
    rows = layout.positions(rank)
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
