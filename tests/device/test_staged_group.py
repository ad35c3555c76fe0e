"""A staged group gives what its inner group gives, slice by slice."""

from __future__ import annotations

from math import ceil

import pytest

from tests.device import staged_ranks


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_equal_those_of_the_inner_group_for_every_root(ranks, size):
    for found in ranks(size, staged_ranks.equal_to_the_inner_group):
        assert found == {name: dict.fromkeys(cases, True) for name, cases in found.items()}
        assert len(found) == len(staged_ranks.INPUTS) + 1


@pytest.mark.parametrize(("size", "numel", "slice_size"), [(2, 1000, 300), (4, 77, 7), (4, 5, 100)])
def test_calls_and_device_memory_are_those_of_the_formula(ranks, size, numel, slice_size):
    used = min(numel, slice_size)
    for rank, found in enumerate(ranks(size, staged_ranks.costs, numel, slice_size)):
        for operation in ("gather", "scatter"):
            assert found[operation] == {
                "calls": ceil(numel / used),
                "others": 0,
                "staged": 4 * used * (size + 1 if rank == 0 else 1),
            }


def test_a_slice_has_elements(ranks):
    assert ranks(2, staged_ranks.refused)[0] == "slice_size must be at least 1, got 0"
