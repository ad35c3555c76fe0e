"""The search finds what an exhaustive one finds, with evaluators whose answers are formulas."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.errors import ConfigError
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.search.bounded_search import Outcome, search
from mindspeed.planner.search.bounds import Bound
from mindspeed.planner.search.result import TOLERANCE, front_of, preference
from mindspeed.planner.search.space import JobSizes, Space, stage_layers

SIZES = JobSizes(16, 64, num_layers=8, heads=8, query_groups=8, seq_length=8192)
SPACE = Space.of(SIZES).with_values(
    {"optimizer": ["distributed"], "memory": [None], "precision": [None]}
)


@dataclass(frozen=True)
class Priced:
    seconds: float
    peak_bytes: int
    exposed: dict[str, float] = field(default_factory=dict)


@dataclass
class Toy:
    """Times and bytes by formulas; ``noise`` makes them irregular, but never below the bounds.

    Attributes:
        refused: what a start refuses, as a condition of (tp, pp, mbs).
        uncounted: signatures that cannot be counted, as a condition of tp.
    """

    noise: dict[int, float]
    refused: frozenset[tuple[int, int, int]] = frozenset()
    uncounted: frozenset[int] = frozenset()
    stop_after: int = 10**9
    slack: float = 0.8
    formula: float = 0.8
    refined: set[Layout] = field(default_factory=set)
    measured: list[Layout] = field(default_factory=list)
    exactly: list[Layout] = field(default_factory=list)
    checked: int = 0

    def price(self, layout: Layout) -> Priced:
        assert layout.signature() in self.measured
        return self.truth(layout)

    exact = price

    def truth(self, layout: Layout) -> Priced:
        factor = 1 + self.noise.get(hash(str(layout)) % len(self.noise), 0.0)
        recompute = layout.recompute or Recompute()
        share = 1 if recompute.layers < 0 else recompute.layers / 8
        bubble = (layout.pp - 1) / (layout.micro_batches * layout.vpp)
        compute = 100 * (1 + bubble) * (1 + share / 3) * (1 + 0.1 * (layout.tp - 1))
        kept = (1.2 - share) * layout.mbs * min(layout.pp, layout.micro_batches)
        nbytes = 1000 / (layout.tp * layout.pp) * (1 + 1 / layout.dp) + 100 * kept / layout.tp
        exposed = {"tp": round(layout.tp * factor, 1)}
        return Priced(compute * factor, int(nbytes * factor), exposed)

    def bound(self, layout: Layout) -> Bound:
        found = self.truth(layout)
        slack = self.slack * (1.0 if layout.signature() in self.refined else self.formula)
        return Bound(slack * found.seconds, slack * found.peak_bytes)

    def refine(self, layout: Layout) -> bool:
        new = layout.signature() not in self.refined
        self.refined.add(layout.signature())
        return new

    def check(self, layout: Layout) -> None:
        self.checked += 1
        if (layout.tp, layout.pp, layout.mbs) in self.refused:
            raise ConfigError(f"--tensor-model-parallel-size {layout.tp}: no ({layout})")

    def key(self, layout: Layout) -> Layout:
        return layout.signature()

    def measure(self, layout: Layout) -> None:
        if len(self.measured) == self.stop_after:
            raise KeyboardInterrupt
        self.measured.append(layout.signature())
        if layout.tp in self.uncounted:
            raise ConfigError("no kernel")


def exhaustive(toy: Toy, limit: float, top: int) -> list[tuple[Layout, Priced]]:
    """The same answer without bounds, signatures or laziness."""
    found = [
        (layout, toy.truth(layout))
        for layout in SPACE.layouts(SIZES, Counter())
        if (layout.tp, layout.pp, layout.mbs) not in toy.refused and layout.tp not in toy.uncounted
    ]
    found = [one for one in found if one[1].peak_bytes <= limit]
    if not found:
        return []
    within = min(priced.seconds for _, priced in found) * (1 + TOLERANCE)

    def rank(one: tuple[Layout, Priced]) -> tuple:
        layout, priced = one
        if priced.seconds <= within:
            return (0, preference(layout, priced))
        return (1, priced.seconds, preference(layout, priced))

    return sorted(found, key=rank)[:top]


@pytest.mark.parametrize("limit", [150, 260, 400, 1000])
def test_estimates_near_the_limit_decide_nothing(limit: float) -> None:
    toy = Estimating({one: one % 7 / 20 for one in range(11)})
    outcome = search(SPACE.layouts(SIZES, Counter()), toy, limit, error=ERROR)
    expected = exhaustive(toy, limit, 10**6)
    found, true = ([one.seconds for _, one in ones] for ones in (outcome.priced, expected))
    assert min(found, default=None) == min(true, default=None)  # ties are ordered by estimates
    assert len(outcome.best) == min(5, len(expected))
    assert all(toy.truth(layout).peak_bytes <= limit for layout, _ in outcome.priced)
    slowest = sorted(true)[4] if len(true) > 4 else float("inf")
    for layout in toy.exactly:
        assert abs(toy.price(layout).peak_bytes / limit - 1) < ERROR
        assert toy.truth(layout).seconds <= slowest * (1 + TOLERANCE)


def run(toy: Toy, limit: float, top: int = 5) -> tuple[Outcome, int]:
    """The outcome, and how many combinations are accounted for."""
    removed: Counter[str] = Counter()
    outcome = search(SPACE.layouts(SIZES, removed), toy, limit, top=top)
    return outcome, removed.total() + outcome.removed.total() + len(outcome.priced)


class Estimating(Toy):
    """Bytes are estimates until they are asked for exactly."""

    def price(self, layout: Layout) -> Priced:
        true = super().price(layout)
        error = ERROR * (hash(str(layout)) % 100 / 100)
        return Priced(true.seconds, int(true.peak_bytes * (1 + error)), true.exposed)

    def exact(self, layout: Layout) -> Priced:
        self.exactly.append(layout)
        return self.truth(layout)


ERROR = 0.03
parts = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.just(1))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    noise=st.lists(st.floats(0, 0.6), min_size=1, max_size=40),
    refused=st.frozensets(parts, max_size=6),
    uncounted=st.frozensets(st.sampled_from([1, 2, 4, 8]), max_size=1),
    limit=st.sampled_from([150, 400, 1000, 5000]),
    top=st.integers(1, 7),
    slack=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_equals_the_exhaustive_search(noise, refused, uncounted, limit, top, slack) -> None:
    toy = Toy(dict(enumerate(noise)), refused, uncounted, slack=slack)
    outcome, accounted = run(toy, limit, top)
    assert outcome.best == exhaustive(toy, limit, top)
    assert accounted == SPACE.total
    assert not outcome.interrupted


def test_bounds_save_signatures_and_checks() -> None:
    tight, loose = Toy({0: 0.0}, slack=0.95), Toy({0: 0.0}, slack=0.0)
    first, _ = run(tight, 1000)
    second, _ = run(loose, 1000)
    assert first.best == second.best
    assert len(tight.measured) < len(loose.measured) / 2
    assert tight.checked < 60


def test_an_interrupted_search_keeps_the_best_so_far() -> None:
    toy = Toy({0: 0.0}, stop_after=2)
    outcome, accounted = run(toy, 5000)
    assert outcome.interrupted and outcome.best
    assert outcome.removed["not reached before the interruption"]
    assert accounted == SPACE.total
    known = {layout.signature() for layout, _ in outcome.best}
    assert known <= set(toy.measured[:2])


def test_refusals_with_the_same_words_are_generalised() -> None:
    class Strict(Toy):
        def check(self, layout: Layout) -> None:
            self.checked += 1
            if layout.tp > 1:
                raise ConfigError("--sequence-parallel: no kernel")

    toy = Strict({0: 0.0})
    outcome, accounted = run(toy, 5000)
    assert {layout.tp for layout, _ in outcome.best} == {1}
    refused = outcome.removed["refused: --sequence-parallel: no kernel"]
    assert refused > 300
    assert toy.checked < 100
    assert accounted == SPACE.total


def test_front_of_time_and_memory() -> None:
    layouts = [Layout(16, 64, tp=tp) for tp in (1, 2, 4, 8)]
    prices = [Priced(1.0, 50), Priced(2.0, 50), Priced(3.0, 10), Priced(1.5, 60)]
    found = front_of(zip(layouts, prices, strict=True))
    assert [layout.tp for layout, _ in found] == [1, 4]


@pytest.mark.parametrize(
    ("split", "stages", "expected"),
    [
        ("even", 4, (2, 2, 2, 2)),
        ("even", 3, None),
        ("ends", 1, None),
        ("ends", 5, (1, 2, 2, 2, 1)),
        ("ends", 3, (3, 3, 2)),
        ("ends", 6, (1, 1, 1, 2, 2, 1)),
        ("ends", 4, None),
        ((3, 5), 2, (3, 5)),
        ((3, 5), 4, None),
    ],
)
def test_layers_of_stages(split, stages, expected) -> None:
    found = stage_layers(8, stages, split)
    assert found == expected


def test_counts_name_the_constraint() -> None:
    sizes = JobSizes(16, 64, num_layers=8, heads=6, query_groups=6, seq_length=8192)
    removed: Counter[str] = Counter()
    kept = list(Space(tp=(1, 2, 4), pp=(1, 2, 3), mbs=(1, 2)).layouts(sizes, removed))
    assert removed == {
        "attention heads are not divisible by tp": 6,
        "devices are not divisible by tp x cp x pp": 4,
    }
    assert len(kept) == 8


def test_a_handler_of_sigterm_stays_and_its_absence_is_an_interruption():
    """The command has one, which knows the exit status."""
    from mindspeed.planner.search.plan import _interruptible

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with _interruptible():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with _interruptible(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
