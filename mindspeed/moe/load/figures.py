"""Figures of the load of a layer's experts.

    figures(tokens=[30, 10, 10, 14], chosen=64, ranks=2, node=1)

=================== ============================================================
max over mean       rows of the fullest expert, rank and node over their mean; ranks wait for the
                    fullest one
entropy             of the shares of experts, over ln E: 1 where all are equal, 0 where one has all
dropped             share of the choices of tokens that no expert has computed
=================== ============================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one layer; see the module's documentation."""

    experts: float
    ranks: float
    nodes: float
    entropy: float
    dropped: float


def max_over_mean(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 without any."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def entropy(loads: Sequence[float]) -> float:
    """Entropy of the shares of experts over that of equal ones; 1 without any."""
    total = sum(loads)
    if not total or len(loads) < 2:
        return 1.0
    shares = [load / total for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads))


def figures(
    tokens: Sequence[float],
    chosen: float,
    ranks: int = 1,
    node: int | None = None,
    place: Sequence[int] | None = None,
) -> LoadFigures:
    """Figures of a layer.

    Args:
        tokens: rows of each expert.
        chosen: choices of all tokens: their number times the experts of a token.
        ranks: ranks that share the experts.
        node: ranks of a node; None: all are in one.
        place: the rank of each expert; None: consecutive ones.
    """
    local = len(tokens) // ranks
    by_rank = [0.0] * ranks
    for expert, rows in enumerate(tokens):
        by_rank[expert // local if place is None else place[expert]] += rows
    of_node = node or ranks
    by_node = [sum(by_rank[first : first + of_node]) for first in range(0, ranks, of_node)]
    return LoadFigures(
        max_over_mean(tokens),
        max_over_mean(by_rank),
        max_over_mean(by_node),
        entropy(tokens),
        1 - sum(tokens) / chosen if chosen else 0.0,
    )
