"""Experts of a token in few bytes: their numbers and weights instead of a dense map.

    ids, weights = compact(probs, routing_map, width)     # [n, e], [n, e] -> [n, width] each
    probs, routing_map = expand(ids, weights, experts)    # [n, experts] each

With 256 experts of which a token takes 8: 8 (2 + 4) = 48 bytes instead of 256 (1 + 4) = 1,280. A
token with fewer experts than ``width`` (dropped ones) has :data:`NOBODY` in the places that are
left. Ids travel as bytes, which every backend of torch.distributed can send.
"""

from __future__ import annotations

import torch

NOBODY = -1
"""In place of an expert: none."""
TOO_MANY = -2
"""In all places of a token that has more experts than places."""
ID_DTYPE = torch.int16


def places(topk: int, experts: int, padded: bool) -> int:
    """The most experts that a token can have.

    Args:
        topk: That the router chooses.
        padded: Experts are filled up to their capacity, with any tokens.
    """
    return experts if padded else min(topk, experts)


def compact(
    probs: torch.Tensor, routing_map: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of every token and their weights, sorted by expert.

    Args:
        probs: ``[n, e]``, floating dtype.
        routing_map: bool ``[n, e]``.
        width: Places for each token.

    Returns:
        ids ``[n, width]``, :data:`ID_DTYPE`; weights ``[n, width]`` in the dtype of ``probs``, zero
        where there is no expert, differentiable.
    """
    ids = _numbers(routing_map.bool(), width)
    return ids, torch.where(ids >= 0, probs.gather(1, ids.clamp(min=0).long()), 0)


def within(
    ids: torch.Tensor, weights: torch.Tensor, first: int | torch.Tensor, experts: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the ids and weights of some experts only.

    Args:
        ids: ``[n, w]``.
        weights: ``[n, w]``, floating dtype.
        first: The first expert that counts, or int ``[n, 1]``, that of each token; it is number 0
            of the result.
        experts: How many count.
        width: Places for each token in the result, at most ``w``.

    Returns:
        ids and weights, ``[n, width]`` each.
    """
    inside = (ids >= first) & (ids < first + experts)
    # Stable: those inside come first, in their order.
    order = torch.argsort(inside.to(torch.int8), dim=1, descending=True, stable=True)[:, :width]
    inside = inside.gather(1, order)
    ids = torch.where(inside, ids.gather(1, order) - first, NOBODY).to(ID_DTYPE)
    return ids, torch.where(inside, weights.gather(1, order), 0)


def expand(
    ids: torch.Tensor, weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense form of some experts.

    Args:
        ids: ``[n, width]``; numbers outside of ``0 .. experts - 1`` do not count.
        weights: ``[n, width]``, floating dtype.

    Returns:
        probs ``[n, experts]`` in the dtype of ``weights``, differentiable, and a bool map of the
        same shape.
    """
    column = _column(ids, experts)
    probs = weights.new_zeros(ids.shape[0], experts + 1).scatter(1, column, weights)
    return probs[:, :experts], _map(column, experts)


def chosen(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """The bool map ``[n, experts]`` of :func:`expand` alone."""
    return _map(_column(ids, experts), experts)


def _column(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Ids ``[n, width]`` as int64; ``experts``, one more column, for those that do not count."""
    return torch.where((ids >= 0) & (ids < experts), ids, experts).long()


def _map(column: torch.Tensor, experts: int) -> torch.Tensor:
    empty = torch.zeros((column.shape[0], experts + 1), dtype=torch.bool, device=column.device)
    return empty.scatter(1, column, True)[:, :experts]


def as_bytes(ids: torch.Tensor) -> torch.Tensor:
    """Ids ``[n, width]`` as uint8 ``[n, 2 width]``, without a copy."""
    return ids.contiguous().view(torch.uint8)


def from_bytes(data: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`as_bytes`: uint8 ``[n, 2 width]`` to ids ``[n, width]``."""
    return data.view(ID_DTYPE)


def _numbers(routing_map: torch.Tensor, width: int) -> torch.Tensor:
    """The columns that are true in every row of ``[n, e]``, in their order."""
    (n, experts), device = routing_map.shape, routing_map.device
    place = routing_map.cumsum(1)  # 1 for the first
    row = torch.where(routing_map & (place <= width), place - 1, width)  # the last is no one's
    number = torch.arange(experts, dtype=ID_DTYPE, device=device).expand(n, experts)
    ids = torch.full((n, width + 1), NOBODY, dtype=ID_DTYPE, device=device)
    ids = ids.scatter(1, row, number)[:, :width]
    return torch.where(place[:, -1:] > width, TOO_MANY, ids).to(ID_DTYPE)
