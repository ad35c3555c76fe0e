"""How many rows each exchange sends for a token, when the router chooses uniformly.

    chance(256, 8, 4)          # that a token needs the experts of one of 4 ranks: 0.902
    flat_rows(256, 8, 4)       # rows to other ranks without deduplication: 6.00
    dedup_rows(256, 8, 4)      # with it: 2.71

With nodes in place of ranks: rows between nodes, of the two-level exchange. A row has as many bytes
as a token.
"""

from __future__ import annotations

from mindspeed.moe.sizes import chance


def flat_rows(experts: int, topk: int, owners: int) -> float:
    """Rows of a token for other owners, one for each of its experts."""
    return topk * (owners - 1) / owners


def dedup_rows(experts: int, topk: int, owners: int) -> float:
    """Rows of a token for other owners, one for each owner."""
    return (owners - 1) * chance(experts, topk, owners)


def gathered_rows(owners: int) -> int:
    """Rows of a token for other owners when all of them get it."""
    return owners - 1


def saving(experts: int, topk: int, owners: int) -> float:
    """The share of the flat exchange's rows that deduplication does not send."""
    return 1 - dedup_rows(experts, topk, owners) / flat_rows(experts, topk, owners)
