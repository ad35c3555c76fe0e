"""What the features ask of a mixture-of-experts layer, and the program that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mindspeed.moe.program import Program
from mindspeed.moe.save.policy import ALL, SavePolicy

ROUTE = "route"


@dataclass(frozen=True)
class LayerRequest:
    """What the features ask of one layer; each sets its own fields.

    Attributes:
        async_permutation: communications of counts are hidden by the permutation.
        overlap: dispatch and combine are hidden by shared experts and weight gradients.
        exchange: how all-to-all sends tokens: "flat", once for each expert; "dedup", once to each
            rank; "hierarchical", once to each node and there once to each rank; "padded", the same
            number to every expert.
        capacity: that number, for a rank's number of tokens.
        pipe_slices: experts are computed one by one, each in so many slices of the tokens; 0: not.
        pipe_chained: with them, collectives of the two expert groups wait for each other.
        save: what the experts keep for backward.
        recompute_above: a rank whose load is larger keeps only the rows of its experts.
    """

    async_permutation: bool = False
    overlap: bool = False
    exchange: str = "flat"
    capacity: Callable[[int], int] | None = None
    pipe_slices: int = 0
    pipe_chained: bool = False
    save: SavePolicy = ALL
    recompute_above: float | None = None


def program_of(request: LayerRequest) -> Program:
    """The program of the all-to-all dispatcher."""
    experts = "gather! arrange experts disarrange scatter!"
    count = "count> permute count<" if request.async_permutation or request.overlap else ""
    if request.pipe_slices:
        return Program.parse("route count> permute count< pieces unpermute")
    head = f"route {count or 'count! permute'}"
    if not request.overlap:
        return Program.parse(f"shared {head} dispatch! {experts} combine! unpermute")
    return Program.parse(
        f"{head} dispatch> shared_fc1 anchor dispatch< {experts} combine> shared_fc2 combine< "
        "unpermute"
    )
