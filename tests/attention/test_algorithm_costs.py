"""Bytes of every algorithm, by the formulas."""

from __future__ import annotations

import pytest

from mindspeed.attention import Mask, Sizes
from mindspeed.attention.algorithm_costs import compare, costs_of
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError

SIZE = 1024
MASK = Mask.causal(SIZE)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("groups", [8, 2])
def test_ring_and_ulysses(ranks: int, groups: int) -> None:
    sizes = Sizes(heads=8, groups=groups, head_size=64, value_size=64)
    rows = SIZE // ranks
    keys, queries = rows * sizes.row, rows * sizes.query_row
    ring = costs_of(Strategy("ring"), MASK, ranks, sizes)
    assert set(ring.forward) == {(ranks - 1) * keys}
    assert set(ring.backward) == {(2 * ranks - 3) * keys}
    ulysses = costs_of(Strategy("ulysses"), MASK, ranks, sizes)
    repeated = keys * max(ranks // groups, 1)
    # What a rank receives of keys for its heads, in the mean over those it gives for others'.
    expected = (ranks - 1) * (2 * queries + repeated) // ranks
    assert set(ulysses.forward) == set(ulysses.backward) == {expected}
    assert ring.balance == ulysses.balance == 1.0


@pytest.mark.parametrize("degree", [2, 4])
def test_hybrid(degree: int) -> None:
    sizes, ranks = Sizes(heads=8, groups=8, head_size=64, value_size=64), 8
    keys, queries = SIZE // ranks * sizes.row, SIZE // ranks * sizes.query_row
    found = costs_of(Strategy("hybrid", ulysses_degree=degree), MASK, ranks, sizes)
    exchanged = (degree - 1) * (2 * queries + keys) // degree
    assert set(found.forward) == {exchanged + (ranks // degree - 1) * keys}


def test_uneven_heads_show_in_the_balance() -> None:
    sizes = Sizes(heads=28, groups=28, head_size=64, value_size=64)
    assert costs_of(Strategy("ulysses"), MASK, 8, sizes).balance == 28 / (8 * 4)


def test_mesh_beats_the_ring_without_grouped_heads() -> None:
    sizes = Sizes(heads=8, groups=8, head_size=64, value_size=64)
    ring, mesh = compare(MASK, 16, sizes, ["ring", "mesh"], Strategy())
    assert mesh.name == "mesh 4 x 4"
    assert 2 * sum(mesh.forward + mesh.backward) < sum(ring.forward + ring.backward)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="ulysses: 2 query heads for 4 ranks"):
        costs_of(Strategy("ulysses"), MASK, 4, Sizes(2, 2, 64, 64))
