"""Ties of a router: which tokens may go to other experts because of rounding.

The choice of experts is not continuous: where a token's scores for two experts are as close as
rounding, two equal runs may choose differently, and all that follows in that micro-batch differs.
Of each router a recording counts, in each block of rows, the tokens by their gap: the lowest score
of a chosen expert less the highest of another, relative to all scores of the token. A choice that
differs is explained where a block has as many tokens with a gap below the noise of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mindspeed.compare.digest import BLOCKS, SKETCHES, WIDTH, Elements
from mindspeed.compare.names import Name
from mindspeed.compare.recording import Recorded, Recording

GAPS = "gaps"
"""Kind of the recorded counts."""
_BIN = 1.5  # powers of two that a bin spans
_WITHIN = 8.0  # of the rms error of logits: what the largest of many errors is below


def counted(scores: torch.Tensor, chosen: torch.Tensor, place: Elements) -> torch.Tensor:
    """Tokens by block and by gap, in the form of a digest, which adds over shards.

    Args:
        scores: ``[tokens, experts]`` by which experts are chosen, any floating dtype.
        chosen: ``[tokens, experts]`` bool.
        place: Of both in the whole tensor.

    Returns:
        ``[BLOCKS, WIDTH]`` fp64: the numbers of tokens, in as many bins as a sketch has numbers.
    """
    scores = scores.detach().float()
    lowest = scores.masked_fill(~chosen, math.inf).amin(1)
    highest = scores.masked_fill(chosen, -math.inf).amax(1)
    gaps = (lowest - highest).abs() / scores.square().mean(1).sqrt().clamp_min(1e-30)
    bins = (-gaps.clamp_min(1e-30).log2() / _BIN).floor().clamp(0, SKETCHES - 1).long()
    signs = place.on(scores.device)
    members = torch.nn.functional.one_hot(bins, SKETCHES).to(signs.wide)
    found = torch.zeros((BLOCKS, WIDTH), dtype=signs.wide, device=scores.device)
    found[:, :SKETCHES] = signs.blocks @ members
    return found


def scores_of(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """What a router of Megatron compares: its logits, or their scores with a bias.

    Args:
        router: Megatron's ``TopKRouter``.
        logits: ``[tokens, experts]``.
    """
    bias = getattr(router, "expert_bias", None)
    if bias is None:
        return logits
    sigmoid = router.score_function == "sigmoid"
    wide = logits.float()
    return (wide.sigmoid() if sigmoid else wide.softmax(-1)) + bias


def close(a: Recorded, error: float) -> torch.Tensor:
    """Tokens of each block whose gap is within an error of the logits: ``[blocks]`` fp64."""
    first = max(0, math.floor(-math.log2(max(_WITHIN * error, 1e-30)) / _BIN))
    return a.sketch[:, min(first, SKETCHES - 1) :].sum(1)


def moved(a: Recorded, b: Recorded) -> torch.Tensor:
    """About how many tokens of each block chose another expert: ``[blocks]`` fp64."""
    return (a.sketch - b.sketch).square().mean(1) / 2


def choices(run: Recording) -> Iterable[Recorded]:
    """The recorded choices of all routers."""
    return (one for one in run.tensors.values() if one.name.what == "choice")


class Moved:
    """What differs because tokens went to other experts.

    Args:
        a: The run that is trusted.
        b: By name under A's numbers of micro-batches.
        explained: Whether a difference of two choices is nobody's fault.
    """

    def __init__(
        self,
        a: Recording,
        b: Any,
        explained: Callable[[Recorded, Recorded], bool] = lambda own, other: True,
    ) -> None:
        self._order = {name: index for index, name in enumerate(a.tensors)}
        self.first: dict[tuple[int, int], Recorded] = {}
        """The choice after which nothing of a micro-batch can be compared, by step and number."""
        for own in choices(a):
            key, other = own.name[:2], b.get(own.name)
            if key in self.first or other is None or own.exact == other.exact:
                continue
            if explained(own, other):
                self.first[key] = own
        self._steps = {step for step, _ in self.first}

    def __contains__(self, name: Name) -> bool:
        """Whether a tensor comes after such a choice."""
        if not self._steps:
            return False
        if name.step > min(self._steps):
            return True
        if name.when in ("begin", "end"):
            return name.when == "end" and name.step in self._steps
        choice = self.first.get(name[:2])
        if choice is None or name.when == "backward":
            return choice is not None
        start = choice.name._replace(what="output")
        return self._order.get(name, 0) >= self._order.get(start, 0)
