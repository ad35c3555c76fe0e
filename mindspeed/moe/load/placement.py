"""Placement of experts on ranks: balanced loads first, then fewest rows between nodes.

    found = search(Question(load, ranks=8, node=4, tokens=tokens))
    found.place        # the rank of each expert
    found.value        # (rows of the fullest rank, rows between nodes)

Largest first: experts in descending order of their rows, each to the rank with the fewest that has
a place left. Then two experts of different ranks, or two ranks with all their experts, change
places as long as that is better, from this start and from random ones; the best is kept. Values
are compared in their order, so rows between nodes never cost balance.

No placement makes the fullest rank emptier than the hottest expert. :func:`with_copies` says what
copies of hot experts would do (``--balanced-moe-experts``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

Token = tuple[int, tuple[int, ...], int]
"""Rank that holds a token, experts that it goes to, number of such tokens."""
Value = tuple[int, int]

STARTS, FEW_STARTS, MANY_EXPERTS = 8, 2, 64


@dataclass(frozen=True)
class PlacementTask:
    """What is placed.

    Attributes:
        load: rows of each expert.
        ranks: each gets equally many experts.
        node: ranks of a node.
        tokens: for rows between nodes; empty: these do not count.
        once: a token is sent once to each other node, not once for each expert there.
    """

    load: Sequence[int]
    ranks: int
    node: int = 1
    tokens: Sequence[Token] = ()
    once: bool = True


@dataclass(frozen=True)
class ExpertPlacement:
    """A placement.

    Attributes:
        place: the rank of each expert.
        value: rows of the fullest rank, rows between nodes.
    """

    place: tuple[int, ...]
    value: Value


def loads(place: Sequence[int], load: Sequence[int], ranks: int) -> list[int]:
    """Rows of each rank."""
    found = [0] * ranks
    for expert, rank in enumerate(place):
        found[rank] += load[expert]
    return found


def between_nodes(place: Sequence[int], question: PlacementTask) -> int:
    """Rows that leave their node."""
    return sum(_crossing(place, token, question) for token in question.tokens)


def _crossing(place: Sequence[int], token: Token, question: PlacementTask) -> int:
    rank, experts, times = token
    own, node = rank // question.node, question.node
    if question.once:
        return times * len({place[expert] // node for expert in experts} - {own})
    return times * sum(place[expert] // node != own for expert in experts)


def value(place: Sequence[int], question: PlacementTask) -> Value:
    """What a placement is worth; less is better."""
    return max(loads(place, question.load, question.ranks)), between_nodes(place, question)


def in_order(question: PlacementTask) -> ExpertPlacement:
    """Consecutive experts on each rank, as Megatron has them."""
    local = len(question.load) // question.ranks
    place = [expert // local for expert in range(len(question.load))]
    return ExpertPlacement(tuple(place), value(place, question))


def largest_first(load: Sequence[int], ranks: int) -> list[int]:
    """Experts in descending order of rows, each to the emptiest rank that has a place."""
    room, rows, place = [len(load) // ranks] * ranks, [0] * ranks, [0] * len(load)
    for expert in sorted(range(len(load)), key=lambda one: (-load[one], one)):
        rank = min((one for one in range(ranks) if room[one]), key=lambda one: (rows[one], one))
        place[expert] = rank
        rows[rank] += load[expert]
        room[rank] -= 1
    return place


@dataclass
class _Swaps:
    """A placement that swaps improve; what a swap changes is computed from its two experts."""

    question: PlacementTask
    place: list[int]
    rows: list[int] = field(init=False)
    crossing: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = loads(self.place, self.question.load, self.question.ranks)
        self.crossing = between_nodes(self.place, self.question)
        self._of: list[list[Token]] = [[] for _ in self.place]
        for token in self.question.tokens:
            for expert in token[1]:
                self._of[expert].append(token)
        self._bound = _FewestRows(self.question) if self.question.tokens else None
        self._look()

    def _look(self) -> None:
        if self._bound is not None:
            self._bound.look(self.place)

    def improve(self) -> None:
        """Swap until no swap is better."""
        moved = True
        while moved:
            moved = False
            for a, b in combinations(range(len(self.place)), 2):
                if self.place[a] != self.place[b] and self._better(a, b):
                    moved = True
            if self.question.tokens and not moved:
                moved = self._rank_moved()

    def _rank_moved(self) -> bool:
        """Swap two ranks of different nodes, if that is better: their loads stay."""
        node = self.question.node
        for a, b in combinations(range(self.question.ranks), 2):
            if a // node == b // node:
                continue
            names = {a: b, b: a}
            place = [names.get(rank, rank) for rank in self.place]
            crossing = between_nodes(place, self.question)
            if crossing < self.crossing:
                self.place, self.crossing = place, crossing
                self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
                self._look()
                return True
        return False

    def _better(self, a: int, b: int) -> bool:
        """Swap two experts of different ranks, if that is better."""
        load, rows, place = self.question.load, self.rows, self.place
        first, second, fullest = place[a], place[b], max(rows)
        alike = self._bound is None or self._bound.change(a, b) >= 0
        if alike and fullest not in (rows[first], rows[second]):
            return False
        moves = load[b] - load[a]
        rows[first], rows[second] = rows[first] + moves, rows[second] - moves
        most = max(rows)
        if most <= fullest:
            touched = self._of[a] + [token for token in self._of[b] if a not in token[1]]
            before = sum(_crossing(place, token, self.question) for token in touched)
            place[a], place[b] = second, first
            crossing = self.crossing - before
            crossing += sum(_crossing(place, token, self.question) for token in touched)
            if (most, crossing) < (fullest, self.crossing):
                self.crossing = crossing
                self._look()
                return True
            place[a], place[b] = first, second
        rows[first], rows[second] = rows[first] - moves, rows[second] + moves
        return False


class _FewestRows:
    """A lower bound of what a swap of two experts changes at the rows between nodes."""

    def __init__(self, question: PlacementTask) -> None:
        tokens = question.tokens
        self._node = question.node
        self._nodes = -(-question.ranks // question.node)
        self._experts = len(question.load)
        pairs = [(i, expert) for i, token in enumerate(tokens) for expert in token[1]]
        self._token, self._expert = np.array(pairs, dtype=np.int64).T
        self._own = np.array([token[0] // question.node for token in tokens])
        self._times = np.array([token[2] for token in tokens])
        self._once = question.once

    def look(self, place: Sequence[int]) -> None:
        """Take a placement."""
        self._at = np.asarray(place) // self._node
        nodes = self._at[self._expert]
        on_node = np.zeros((len(self._own), self._nodes), dtype=np.int64)
        np.add.at(on_node, (self._token, nodes), 1)
        times = self._times[self._token]
        away = self._own[:, None] != np.arange(self._nodes)
        new = away if not self._once else away & (on_node == 0)
        left = away if not self._once else away & (on_node == 1)
        self._more = np.zeros((self._experts, self._nodes), dtype=np.int64)
        np.add.at(self._more, self._expert, new[self._token] * times[:, None])
        self._less = np.zeros(self._experts, dtype=np.int64)
        np.add.at(self._less, self._expert, left[self._token, nodes] * times)

    def change(self, a: int, b: int) -> int:
        """Rows that a swap adds, at least; tokens of both experts keep their nodes."""
        first, second = self._at[a], self._at[b]
        if first == second:
            return 0
        more = self._more[a, second] + self._more[b, first]
        return int(more - self._less[a] - self._less[b])


def search(question: PlacementTask, starts: int | None = None, seed: int = 0) -> ExpertPlacement:
    """The best placement found from largest first and from random ones.

    Args:
        starts: random ones; None: fewer for many experts.
        seed: of these.
    """
    experts, chance = len(question.load), random.Random(seed)
    if starts is None:
        starts = STARTS if experts <= MANY_EXPERTS else FEW_STARTS
    first = largest_first(question.load, question.ranks)
    places = [first]
    for _ in range(starts):
        places.append([expert % question.ranks for expert in range(experts)])
        chance.shuffle(places[-1])
    found = []
    for place in places:
        swaps = _Swaps(question, place)
        swaps.improve()
        found.append(ExpertPlacement(tuple(swaps.place), (max(swaps.rows), swaps.crossing)))
    return min(found, key=lambda one: one.value)


def copies_of(load: Sequence[int], places: int) -> list[int]:
    """Copies of each expert: one more where a copy's share is largest, until places are full."""
    copies = [1] * len(load)
    for _ in range(places - len(load)):
        hottest = max(range(len(load)), key=lambda one: (load[one] / copies[one], -one))
        copies[hottest] += 1
    return copies


def with_copies(load: Sequence[int], ranks: int, places: int) -> tuple[float, list[int]]:
    """Rows of the fullest rank where hot experts have copies, and the copies of each expert.

    Args:
        load: rows of each expert.
        ranks: of which each has ``places / ranks`` places.
        places: for experts and copies.
    """
    copies = copies_of(load, places)
    shares = [
        (load[one] / copies[one], one) for one in range(len(load)) for _ in range(copies[one])
    ]
    room, rows = [places // ranks] * ranks, [0.0] * ranks
    held: list[set[int]] = [set() for _ in range(ranks)]
    for share, expert in sorted(shares, reverse=True):
        free = [rank for rank in range(ranks) if room[rank]]
        rank = min(free, key=lambda one: (expert in held[one], rows[one], one))
        room[rank] -= 1
        rows[rank] += share
        held[rank].add(expert)
    return max(rows), copies
