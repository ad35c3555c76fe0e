"""Numbers of rows that quantised products take: additional tokens fill an expert up.

They have the probability 0, so they change no result; their rows cost a computation.
"""

from __future__ import annotations

import torch


def filled_up(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
    """Give every expert a multiple of rows, as far as there are tokens.

    Args:
        routing_map: bool ``[n, experts]``.
        multiple: that the rows of an expert become a multiple of.

    Returns:
        bool ``[n, experts]``; an expert's first tokens that were not routed to it are added.
    """
    missing = -routing_map.sum(0) % multiple
    others = (~routing_map).cumsum(0)
    return routing_map | (others <= missing)
