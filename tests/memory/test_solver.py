"""The solver equals brute force, and what it returns always fits."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed.memory import solver
from mindspeed.memory.solver import Budget, LayerCosts, NothingFits, PlanCandidate, solve


def peak_of(layers, choice, budget):
    """The definition: static bytes, other micro-batches, this one up to the layer in backward."""
    if len({(layer.in_flight, layer.chunk) for layer in layers}) > 1:
        kept = sum(layer.in_flight * one.kept for layer, one in zip(layers, choice, strict=True))
        return budget.static + kept + max(budget.head, budget.front, *(x.transient for x in choice))
    kept = sum(one.kept for one in choice)
    moments = [
        sum(one.kept for one in choice[: place + 1]) + choice[place].transient
        for place in range(len(layers))
    ]
    others = (layers[0].in_flight - 1) * kept
    return budget.static + others + max(budget.front, kept + budget.head, *moments)


def brute_force(layers, budget):
    """Seconds of the fastest choice that fits, and the smallest peak of any; else infinite."""
    fastest = smallest = math.inf
    for choice in itertools.product(*(layer.candidates for layer in layers)):
        counts = [layer.in_flight for layer in layers]
        host = sum(k * one.host for k, one in zip(counts, choice, strict=True))
        if budget.host is not None and host > budget.host:
            continue
        peak = peak_of(layers, choice, budget)
        smallest = min(smallest, peak)
        moved = sum(one.host for one in choice) * budget.seconds_per_host_byte
        seconds = sum(one.seconds for one in choice) + max(0, moved - budget.hidden_seconds)
        if peak <= budget.device:
            fastest = min(fastest, seconds)
    return fastest, smallest


def check(layers, budget):
    """Compare one case with brute force; returns whether something fits."""
    fastest, smallest = brute_force(layers, budget)
    try:
        solution = solve(layers, budget)
    except NothingFits as error:
        assert fastest == math.inf
        found = error.smallest.peak if error.smallest else math.inf
        assert found == smallest
        return False
    assert solution.seconds == pytest.approx(fastest, abs=1e-9)
    assert_fits(layers, budget, solution)
    return True


def assert_fits(layers, budget, solution):
    """The solution takes one candidate of each layer, and its figures are theirs."""
    assert all(one in layer.candidates for one, layer in zip(solution.chosen, layers, strict=True))
    assert solution.peak == peak_of(layers, solution.chosen, budget)
    assert solution.peak <= budget.device
    assert solution.host == sum(
        layer.in_flight * one.host for layer, one in zip(layers, solution.chosen, strict=True)
    )
    assert budget.host is None or solution.host <= budget.host


def random_case(seed):
    """A small model: equal layers in every other case, and with copies to the host in some."""
    draw = random.Random(seed)
    offload, in_flight = seed % 3 == 0, draw.choice([1, 1, 2, 3])

    def layer(number):
        return LayerCosts(
            tuple(
                PlanCandidate(
                    plan=f"{number}.{index}",
                    kept=draw.randint(1, 60),
                    seconds=draw.randint(0, 40),
                    transient=draw.randint(0, 30),
                    host=draw.choice([0, 0, draw.randint(1, 40)]) if offload else 0,
                )
                for index in range(4)
            ),
            in_flight=draw.choice([1, 1, 2, 3]) if seed % 4 == 0 else in_flight,
        )

    layers = [layer(0)] * 5 if seed % 2 else [layer(number) for number in range(5)]
    budget = Budget(
        device=draw.randint(20, 400),
        static=draw.randint(0, 20),
        head=draw.choice([0, draw.randint(0, 90)]),
        front=draw.choice([0, draw.randint(0, 200)]),
        host=draw.choice([None, draw.randint(0, 150)]) if offload else None,
        seconds_per_host_byte=draw.choice([0.0, 0.25, 2.0]),
        hidden_seconds=draw.choice([0.0, 20.0]),
    )
    return layers, budget


@pytest.mark.slow
def test_equals_brute_force_in_300_random_cases():
    solved = sum(check(*random_case(seed)) for seed in range(300))
    assert 100 < solved < 290  # both answers occur


CANDIDATES = st.builds(
    PlanCandidate,
    plan=st.integers(0, 9),
    kept=st.integers(0, 50),
    seconds=st.integers(0, 20).map(float),
    transient=st.integers(0, 20),
    host=st.integers(0, 10),
)
CHOICES = st.lists(CANDIDATES, min_size=1, max_size=3).map(tuple)
LAYERS = st.lists(
    st.builds(LayerCosts, CHOICES, st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=4
) | st.integers(1, 4).flatmap(
    lambda k: st.lists(st.builds(LayerCosts, CHOICES, st.just(k)), min_size=1, max_size=4)
)
BUDGETS = st.builds(
    Budget,
    device=st.integers(0, 500),
    static=st.integers(0, 50),
    head=st.integers(0, 30),
    front=st.integers(0, 60),
    host=st.none() | st.integers(0, 60),
    seconds_per_host_byte=st.sampled_from([0.0, 0.5]),
    hidden_seconds=st.sampled_from([0.0, 5.0]),
)


@settings(max_examples=100, deadline=None)
@given(LAYERS, BUDGETS)
def test_equals_brute_force(layers, budget):
    check(layers, budget)


def sites(count):
    """All combinations of recomputing ``count`` sites of different sizes and times."""
    draw = random.Random(count)
    sizes = [(draw.randint(10, 400) << 20, draw.uniform(0.1, 5.0)) for _ in range(count)]
    return tuple(
        PlanCandidate(
            plan=again,
            kept=sum(size for (size, _), on in zip(sizes, again, strict=True) if not on),
            seconds=sum(time for (_, time), on in zip(sizes, again, strict=True) if on),
            transient=max(
                (size for (size, _), on in zip(sizes, again, strict=True) if on), default=0
            ),
        )
        for again in itertools.product((False, True), repeat=count)
    )


def test_a_large_model_fits_any_budget_and_a_larger_budget_is_never_slower():
    layers = [LayerCosts(sites(6), in_flight=2)] * 24
    most = solve(layers, Budget(2**62)).peak
    least = solver.smallest_peak(layers, Budget(0)).peak
    seconds = []
    for budget in np.linspace(least, most, 4).astype(int):
        solution = solve(layers, Budget(int(budget)))
        assert_fits(layers, Budget(int(budget)), solution)
        seconds.append(solution.seconds)
    assert seconds[-1] == 0 and all(np.diff(seconds) <= 0)
    with pytest.raises(NothingFits):
        solve(layers, Budget(least - 1))


def test_thinning_costs_little(monkeypatch):
    layers = [LayerCosts(sites(5))] * 6
    budget = Budget(int(0.4 * solve(layers, Budget(2**62)).peak))
    exact = solve(layers, budget)
    monkeypatch.setattr(solver, "MOST_STATES", 64)
    thinned = solve(layers, budget)
    assert_fits(layers, budget, thinned)
    assert exact.seconds <= thinned.seconds <= 1.1 * exact.seconds


def test_equal_plans_of_equal_layers_are_side_by_side():
    kept, again = PlanCandidate("keep", 10, 0.0), PlanCandidate("recompute", 1, 1.0, transient=10)
    other = PlanCandidate("keep", 3, 0.0)
    layers = [LayerCosts((kept, again), 2)] * 5 + [LayerCosts((other,), 2)]
    assert solve(layers, Budget(66)).runs() == [(3, "recompute"), (3, "keep")]


def test_a_late_layer_with_a_large_second_run_lets_early_ones_keep_more():
    """A last layer that recomputes needs 12 and what is kept before it, a first one only 12."""
    kept, again = PlanCandidate("keep", 10, 0.0), PlanCandidate("recompute", 2, 1.0, transient=10)
    solution = solve([LayerCosts((kept, again))] * 4, Budget(33))
    assert (solution.runs(), solution.peak) == ([(1, "recompute"), (3, "keep")], 32)
    several = solve([LayerCosts((kept, again), 2)] * 4, Budget(64))
    assert (several.runs(), several.peak) == ([(1, "recompute"), (3, "keep")], 64)


def test_chunks_with_other_numbers_in_flight_count_as_a_whole():
    one = PlanCandidate("again", 2, 1.0, transient=10)
    layers = [LayerCosts((one,), 3, chunk) for chunk in (0, 0, 1)]
    assert solve(layers, Budget(28)).peak == 3 * 6 + 10


def test_copies_that_computation_hides_cost_nothing():
    moved, again = PlanCandidate("offload", 0, 0.0, host=8), PlanCandidate("recompute", 1, 1.0)
    layers = [LayerCosts((moved, again))] * 4
    hides_two = Budget(100, seconds_per_host_byte=0.5, hidden_seconds=8.0)
    assert solve(layers, hides_two).runs() == [(2, "offload"), (2, "recompute")]
    assert solve(layers, hides_two).seconds == 2.0


def test_nothing_is_copied_without_need():
    kept, moved = PlanCandidate("keep", 8, 0.0), PlanCandidate("offload", 0, 0.0, host=8)
    layers = [LayerCosts((kept, moved))] * 4
    assert solve(layers, Budget(100, hidden_seconds=8.0)).runs() == [(4, "keep")]
    assert solve(layers, Budget(20, hidden_seconds=8.0)).runs() == [(2, "offload"), (2, "keep")]


def test_error_names_the_smallest_peak_and_what_reaches_it():
    mib = 2**20
    layers = [
        LayerCosts((PlanCandidate("keep", 8 * mib, 0.0), PlanCandidate("again", mib, 1.0, 7 * mib)))
    ]
    with pytest.raises(NothingFits) as error:
        solve(layers * 4, Budget(20 * mib, static=10 * mib))
    assert str(error.value) == (
        "no plan fits into 20.0 MiB: the smallest predicted peak is 21.0 MiB, 10.0 MiB of it "
        "without activations; it is reached with 4 x again"
    )
    with pytest.raises(NothingFits, match=r"no plan fits into 3\.0 MiB of host memory"):
        offloaded = LayerCosts((PlanCandidate("offload", 0, 0.0, host=4 * mib),))
        solve([offloaded], Budget(20 * mib, host=3 * mib))


def test_stage_without_layers():
    assert solve([], Budget(10, static=4)).peak == 4


def test_optimal_with_more_distinct_transients_than_a_list_of_them_would_try():
    # Recomputing in 40 sizes of parts: fewer kept bytes need a larger transient and more time.
    layer = LayerCosts(
        tuple(
            PlanCandidate(n, kept=400 - 7 * n, seconds=float(n), transient=9 * n) for n in range(40)
        )
    )
    for device in (800, 850, 903, 977):
        check([layer] * 2, Budget(device))
    few = LayerCosts(tuple(PlanCandidate(n, 100 - n, 1.0, transient=n * n) for n in range(40)))
    for in_flight in (1, 2, 3):
        layers = [LayerCosts(few.candidates, in_flight)] * 2
        assert solver.smallest_peak(layers, Budget(0)).peak == brute_force(layers, Budget(0))[1]
