"""Bytes of real ranks, which a walk of their objects finds, are those of the planner.

Jobs of all areas and jobs drawn by chance from printed seeds; ``python -m tests.planner.oracle``
asks all of them and prints a table.
"""

from __future__ import annotations

import pytest

from tests.planner import oracle
from tests.planner.oracle_jobs import AREAS, LISTED, SEEDS

UNSPLICED = ("latent attention: experts", 0)
"""Asked without the splice."""
DAILY = (
    *("interleaved: four stages", "recomputed: stages", "paddings: eight replicas"),
    *("adapters: stages, recomputed", 1),
)


def _case(name: str | int) -> object:
    marks = [pytest.mark.slow] if name in DAILY else [pytest.mark.slow, pytest.mark.weekly]
    return pytest.param(name, marks=marks, id=str(name))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", UNSPLICED, ids=str)
def test_bytes_of_a_walk_are_those_of_fake_tensors(ranks, name):
    found = oracle.ask(ranks, name, spliced=False)
    assert not found.differences, found.job


@pytest.mark.parametrize("name", [_case(name) for name in (*LISTED, *SEEDS)])
def test_bytes_of_a_walk_are_those_of_the_planner(ranks, name):
    """After every action those of spliced recordings, too."""
    found = oracle.ask(ranks, name)
    assert not found.differences and not found.wrong, found.job


def test_jobs_are_of_all_areas_and_a_third_of_them_is_drawn():
    assert len(LISTED) >= 80 and len(SEEDS) >= 40
    assert len(SEEDS) >= (len(LISTED) + len(SEEDS)) / 3
    assert len(AREAS) == 10
