"""The rows that a rank sends and receives for an actual routing, counted token by token."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.moe.sizes import Load, Sizes

Choices = Sequence[Sequence[Sequence[int]]]
"""Experts of every token of every rank: ``choices[rank][token]``, ranks with slices fastest."""


def load_of(sizes: Sizes, choices: Choices, rank: int, part: tuple[int, int] | None = None) -> Load:
    """The rows of one rank for an actual routing.

    Args:
        choices: of all ranks of the experts.
        rank: index in ``choices``.
        part: only these local experts of every rank, from the first to before the second.
    """
    begin, end = part or (0, sizes.local)
    own, index = divmod(rank, sizes.etp)
    peers = range(sizes.ep)

    def rows(source: int, target: int, distinct: bool) -> float:
        first = target * sizes.local
        low, high = first + begin, first + end
        found = [sum(low <= expert < high for expert in token) for token in choices[source]]
        return sum(map(bool, found)) if distinct else sum(found)

    def both(distinct: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
        sent = tuple(rows(rank, peer, distinct) for peer in peers)
        received = tuple(rows(peer * sizes.etp + index, own, distinct) for peer in peers)
        return sent, received

    slices = tuple(
        sum(rows(peer * sizes.etp + slice_, own, False) for peer in peers)
        for slice_ in range(sizes.etp)
    )
    return Load(own, *both(False), *both(True), slices, index)
