"""DeepSpeed's mixture of experts as published: one-hot matrices and einsums, one process, fp64.

    dispatched = einsum("sec,sm->ecm", mask, x)
    output     = einsum("sec,ecm->sm", combine, experts(dispatched))

Source: GShard, algorithm 1; the formulas of DeepSpeed's gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import one_hot


def capacity_of(tokens: int, experts: int, topk: int, factor: float) -> int:
    return min(max(math.ceil(round(topk * tokens / experts * factor, 9)), 4), tokens)


def combine_weights(
    gates: torch.Tensor,
    topk: int,
    capacity: int,
    priority: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, E, C]`` weights and the loss, of ``gates [n, E]``."""
    tokens, experts = gates.shape
    scores = gates if scores is None else scores
    first = one_hot(scores.argmax(1), experts).double()
    loss = experts * (gates.mean(0) * first.mean(0)).sum()
    if topk == 1:
        if priority is None:
            priority = torch.arange(tokens, 0, -1).double()
        best = (first * priority.unsqueeze(1)).topk(min(capacity, tokens), dim=0).indices
        first = first * torch.zeros_like(first).scatter(0, best, 1.0)
        slots = ((first.cumsum(0) - 1) * first).sum(1).long()
        return torch.einsum("se,sc->sec", gates * first, one_hot(slots, capacity).double()), loss
    second = one_hot(scores.masked_fill(first.bool(), -math.inf).argmax(1), experts).double()
    places = [first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0)]
    masks = [mask * (place < capacity) for mask, place in zip((first, second), places, strict=True)]
    values = [torch.einsum("se,se->s", gates, mask) for mask in masks]
    total = (values[0] + values[1]).clamp(min=torch.finfo(torch.float32).eps)
    weights = torch.zeros(tokens, experts, capacity, dtype=gates.dtype)
    for mask, place, value in zip(masks, places, values, strict=True):
        slots = (place * mask).sum(1).long()
        weight = torch.einsum("s,se->se", value / total, mask)
        weights = weights + torch.einsum("se,sc->sec", weight, one_hot(slots, capacity).double())
    return weights, loss


def layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: Callable[[torch.Tensor], torch.Tensor],
    topk: int,
    capacity: int,
    priority: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[n, m]`` and loss of ``x [n, m]``, with a gate ``weight [E, m]``.

    Args:
        x: Tokens.
        weight: Of the gate.
        experts: Of ``[E, C, m]``.
        topk: 1 or 2.
        capacity: C.
        priority: Random, ``[n]``, for top-1.
    """
    gates = torch.softmax(x @ weight.t(), dim=1)
    weights, loss = combine_weights(gates, topk, capacity, priority)
    dispatched = torch.einsum("sec,sm->ecm", weights.bool().to(x.dtype), x)
    return torch.einsum("sec,ecm->sm", weights, experts(dispatched)), loss
