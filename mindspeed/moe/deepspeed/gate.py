"""DeepSpeed's gates: which experts a token goes to, with which weights, and who has room.

    top-1   e = argmax(gates), weight gates[e]; an expert with too many tokens keeps those of the
            highest priority: random ones, or the first of the batch
    top-2   the two largest gates; all first choices take their slots before any second choice;
            weights are normalised over the choices that were kept

gates = softmax(logits) in fp32, [n, E]: n tokens, E experts. Dropped choices are masked, so a token
that no expert has room for gets no output and no gradient. Rows of a rank that an expert has room
for:

    Capacity    ceil(k n / E * factor), at least 4 and at most n (DeepSpeed's ``_capacity``)
    Window      of the loads of earlier steps: the mean of the last five, and twenty more

Source: Lepikhin et al., "GShard" (2020); Fedus et al., "Switch Transformer" (2021); Rajbhandari et
al., "DeepSpeed-MoE" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch

MINIMUM = 4


@dataclass(frozen=True)
class Capacity:
    """A multiple of the mean load.

    Attributes:
        factor: > 0.
    """

    factor: float
    experts: int
    topk: int

    def __call__(self, tokens: int) -> int:
        """Rows for an expert, of the tokens of one rank."""
        # The factor is the decimal that was written: 1.1 * 10 is 11, not 11.000000000000002.
        exact = Fraction(repr(float(self.factor))) * self.topk * tokens / self.experts
        return min(max(math.ceil(exact), MINIMUM), tokens)


@dataclass(eq=False)
class Window:
    """A capacity that follows the loads of earlier steps, one for all steps of a window.

    So shapes change once in a window only, and never within a step: a recomputation finds the
    capacity of its forward, and what it observes again changes nothing. All ranks that observe the
    same loads have the same capacity. It is not saved: training that resumes begins a first window.

    Attributes:
        capacity: of this window; before one is complete, the first's.
        length: steps of a window.
        last: steps at its end whose mean predicts the next window.
        margin: rows on top of the mean.
    """

    capacity: int = 256
    length: int = 20
    last: int = 5
    margin: int = 20
    _largest: int = -1
    _loads: list[int] = field(default_factory=list)

    def __call__(self, tokens: int) -> int:
        """Rows for an expert, of the tokens of one rank; their number does not matter."""
        return self.capacity

    def observe(self, load: int) -> None:
        """Take the largest number of rows that any rank had for any expert in a micro-batch."""
        self._largest = max(self._largest, load)

    def advance(self) -> None:
        """The step is over; nothing happens if no load was observed in it."""
        if self._largest < 0:
            return
        self._loads.append(self._largest)
        self._largest = -1
        if len(self._loads) == self.length:
            mean = Fraction(sum(self._loads[-self.last :]), self.last)
            self.capacity = math.ceil(mean) + self.margin
            self._loads.clear()


@dataclass(frozen=True)
class GateRouting:
    """The experts of the tokens of a rank.

    Attributes:
        probs: weights, fp32 ``[n, E]``, zero where a token does not go.
        routing_map: bool ``[n, E]``, what is kept.
        first: bool ``[n, E]``, the first choices before any was dropped.
    """

    probs: torch.Tensor
    routing_map: torch.Tensor
    first: torch.Tensor


def route(
    gates: torch.Tensor,
    scores: Sequence[torch.Tensor],
    capacity: int | None,
    order: torch.Tensor | None = None,
) -> GateRouting:
    """Choose experts.

    Args:
        gates: ``[n, E]``, fp32 or fp64.
        scores: ``[n, E]`` for the first and, with top-2, the second choice: the largest is chosen.
        capacity: rows of an expert; None keeps all.
        order: int64 ``[n]``, tokens in the order in which they take slots; None: the batch's.
    """
    kept: list[torch.Tensor] = []
    taken: int | torch.Tensor = 0
    first = chosen = None
    for score in scores:
        if chosen is not None:
            score = score.masked_fill(chosen, -torch.inf)
        choice = torch.zeros_like(gates, dtype=torch.bool)
        choice.scatter_(1, score.argmax(1, keepdim=True), True)
        kept.append(choice if capacity is None else _keep(choice, capacity - taken, order))
        taken = taken + choice.sum(0)
        first = choice if first is None else first
        chosen = choice if chosen is None else chosen | choice
    assert first is not None
    routing_map = kept[0] if len(kept) == 1 else kept[0] | kept[1]
    weights = torch.where(routing_map, gates, 0.0)
    if len(kept) == 2:
        smallest = torch.finfo(weights.dtype).eps
        weights = weights / weights.sum(1, keepdim=True).clamp(min=smallest)
    return GateRouting(weights, routing_map, first)


def _keep(
    choice: torch.Tensor, room: int | torch.Tensor, order: torch.Tensor | None
) -> torch.Tensor:
    """The choices ``[n, E]`` that get one of the slots that experts have room for."""
    if order is None:
        return choice & (choice.cumsum(0) <= room)
    rank = choice[order].cumsum(0)
    return choice & (torch.empty_like(rank).index_copy_(0, order, rank) <= room)


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Noise that makes the largest of ``logits + noise`` a draw from their softmax.

    Args:
        uniform: from 0 to 1, fp32 or fp64.
    """
    exponential = -torch.log(uniform.clamp(min=torch.finfo(uniform.dtype).tiny))
    return -torch.log(exponential.clamp(min=torch.finfo(uniform.dtype).tiny))


def balance_loss(
    gates: torch.Tensor, first: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """``E sum_e mean(gates)_e mean(first)_e``, a scalar: 1 when balanced, differentiable in gates.

    GShard's ``E^2 mean_e(...)`` for top-2 is the same.

    Args:
        gates: ``[n, E]``, fp32.
        first: bool ``[n, E]``, first choices before drops.
        valid: bool ``[n]``; other tokens are padding and not counted.
    """
    tokens: int | torch.Tensor = max(gates.shape[0], 1)
    if valid is not None:
        gates = torch.where(valid.unsqueeze(1), gates, 0.0)
        first = first & valid.unsqueeze(1)
        tokens = valid.sum().clamp(min=1)
    chosen = first.sum(0, dtype=gates.dtype)
    return gates.shape[1] * ((gates.sum(0) / tokens) * (chosen / tokens)).sum()
