"""Placements of experts on ranks: equal to all placements tried, and the published figures."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from mindspeed.moe.load.placement import (
    PlacementTask,
    in_order,
    largest_first,
    loads,
    search,
    value,
    with_copies,
)


def zipf(experts, exponent, chance):
    weights = [1 / (k + 1) ** exponent for k in range(experts)]
    chance.shuffle(weights)
    return [round(10000 * weight / sum(weights)) for weight in weights]


def exact(question):
    """The best value of all placements; ranks are alike where nodes do not count."""
    size, place = len(question.load) // question.ranks, [0] * len(question.load)
    best = []

    def fill(rank, left):
        if rank == question.ranks - 1:
            for expert in left:
                place[expert] = rank
            found = value(place, question)
            if not best or found < best[0]:
                best[:] = [found]
            return
        alike = not question.tokens
        pool = combinations(left[1:], size - 1) if alike else combinations(left, size)
        for others in pool:
            chosen = (left[0], *others) if alike else others
            if best and sum(question.load[expert] for expert in chosen) > best[0][0]:
                continue
            for expert in chosen:
                place[expert] = rank
            fill(rank + 1, [expert for expert in left if expert not in chosen])

    fill(0, list(range(len(question.load))))
    return best[0]


def test_search_equals_all_placements_tried_in_100_of_100():
    chance = random.Random(1)
    largest = equal = 0
    for experts, ranks in ((6, 3), (8, 4), (8, 2), (9, 3), (10, 5)):
        for _ in range(20):
            load = zipf(experts, chance.choice((0.3, 0.7, 1.0)), chance)
            question = PlacementTask(load, ranks)
            best = exact(question)
            found = search(question)
            assert found.value == value(found.place, question)
            equal += found.value == best
            largest += max(loads(largest_first(load, ranks), load, ranks)) == best[0]
    assert (equal, largest) == (100, 74)  # largest first alone is not enough


@pytest.mark.parametrize("once", [True, False])
def test_rows_between_nodes_come_second_and_equal_all_placements_tried(once):
    chance = random.Random(1)
    fewer = 0
    for _ in range(20):
        load, tokens = [0] * 8, []
        for _ in range(60):
            group = chance.randrange(4)  # pairs of experts that many tokens go to
            pair = {group, (group + 4) % 8}
            chosen = pair if chance.random() < 0.7 else set(chance.sample(range(8), 2))
            tokens.append((2 * chance.randrange(2), tuple(sorted(chosen)), 1))
            for expert in chosen:
                load[expert] += 1
        question = PlacementTask(load, ranks=4, node=2, tokens=tokens, once=once)
        found = search(question)
        assert found.value == exact(question)
        assert found.value == value(found.place, question)
        fewer += found.value[1] < in_order(question).value[1]
    assert fewer == 20


# experts, ranks, exponent -> in order, searched, hottest expert, with a copy more on each rank
PUBLISHED = [
    (64, 8, 0.5, 1.645, 1.039, 0.548, 1.001),
    (64, 8, 0.8, 1.690, 1.428, 1.132, 1.001),
    (64, 8, 1.0, 2.060, 1.880, 1.686, 1.001),
    (256, 32, 0.5, 1.971, 1.510, 1.046, 1.001),
    (256, 32, 0.8, 3.881, 3.228, 2.982, 1.002),
    (256, 32, 1.0, 6.280, 5.368, 5.227, 1.007),
]


def test_what_placement_and_copies_reach():
    chance = random.Random(7)
    for experts, ranks, exponent, ordered, searched, hottest, copied in PUBLISHED:
        load = zipf(experts, exponent, chance)
        question, mean = PlacementTask(load, ranks), sum(load) / ranks
        found = search(question)
        assert in_order(question).value[0] / mean == pytest.approx(ordered, abs=5e-4)
        assert found.value[0] / mean == pytest.approx(searched, abs=5e-4)
        assert max(load) / mean == pytest.approx(hottest, abs=5e-4)
        most, copies = with_copies(load, ranks, experts + ranks)
        assert most / mean == pytest.approx(copied, abs=5e-4)
        assert max(copies) <= (5 if experts == 64 else 28)
