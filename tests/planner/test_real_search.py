"""The search of a small real space: its bounds, its answer, and what it keeps for the next one."""

from __future__ import annotations

import pytest

from mindspeed.planner.layout import Recompute
from mindspeed.planner.search.result import TOLERANCE
from tests.planner import search_jobs
from tests.planner.search_jobs import SETUP

pytestmark = pytest.mark.timeout(900)  # one search for all tests, also on a loaded machine

ARGV = [
    *("--num-layers", "4", "--hidden-size", "512", "--ffn-hidden-size", "1024", "--swiglu"),
    *("--num-attention-heads", "8", "--seq-length", "512", "--vocab-size", "2048", "--bf16"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--global-batch-size", "32"),
    "--use-distributed-optimizer",
]
DEVICES = 8
SPACE = {
    "tp": (2,),
    "pp": (1, 2),
    "vpp": (1, 2),
    "recompute": (Recompute(), Recompute(layers=1)),
    "split": ("even", "ends"),
}
SPACES = [
    pytest.param((ARGV, SPACE), id="two stages"),
    pytest.param(
        ([*ARGV, "--num-layers", "8"], {**SPACE, "pp": (1, 2, 4)}),
        id="four stages, too",
        marks=pytest.mark.weekly,
    ),
]


@pytest.fixture(scope="module", params=SPACES)
def job_and_values(request):
    """Flags of a job, and the values of its space."""
    return request.param


@pytest.fixture(scope="module")
def space(job_and_values, rank_pool, tmp_path_factory):
    """Prices of all layouts, and where their runs are kept."""
    argv, values = job_and_values
    cache = str(tmp_path_factory.mktemp("runs"))
    (found,) = rank_pool.run(
        1,
        search_jobs.every_price,
        argv,
        DEVICES,
        values,
        cache,
        setup=SETUP,
        backend=None,
        timeout=600,
    )
    return found, cache


@pytest.mark.slow
def test_no_bound_is_above_the_price(space, job_and_values):
    (found, _), (_, values) = space, job_and_values
    # Two layouts without stages, four with each number of them.
    assert len(found) == 2 + 4 * (len(values["pp"]) - 1)
    for layout, (formula, refined), (seconds, nbytes), _ in found:
        for bound in (formula, refined):
            assert 0 < bound.seconds <= seconds, layout
            assert 0 < bound.nbytes <= nbytes, layout
        assert refined.seconds > formula.seconds


@pytest.mark.slow
def test_a_shape_is_that_of_the_job(space):
    assert [layout for layout, *_, (same, _) in space[0] if not same] == []


NEAR_ENOUGH = 0.05
"""Half of what a search takes for near the limit."""


@pytest.mark.slow
def test_estimated_bytes_are_near_the_exact_ones(space):
    found = {layout: error for layout, *_, (_, error) in space[0]}
    assert {error for layout, error in found.items() if layout.vpp == 1} == {0.0}
    assert all(-0.01 < error < NEAR_ENOUGH for error in found.values()), found
    assert any(found.values())


@pytest.mark.slow
def test_bytes_of_schedules_with_recordings_of_their_own_are_exact(ranks, tmp_path):
    values = {"tp": (2,), "pp": (2,), "recompute": (Recompute(),), "schedule": (None, "zb-h1")}
    options = {"setup": SETUP, "backend": None}
    (found,) = ranks(1, search_jobs.every_price, ARGV, DEVICES, values, str(tmp_path), **options)
    assert {one[0].schedule: one[-1][1] for one in found} == {None: 0.0, "zb-h1": None}


@pytest.mark.slow
def test_the_search_finds_the_best_of_all(space, job_and_values, ranks):
    (found, cache), (argv, values) = space, job_and_values
    fullest = sorted(nbytes for *_, (_, nbytes), _ in found)
    limit = fullest[len(fullest) // 2]
    fitting = [(layout, price) for layout, _, price, _ in found if price[1] <= limit]
    fastest = min(price[0] for _, price in fitting)
    ties = {layout for layout, price in fitting if price[0] <= fastest * (1 + TOLERANCE)}
    options = {"setup": SETUP, "backend": None}
    (answer,) = ranks(1, search_jobs.searched, argv, DEVICES, values, cache, limit, 3, **options)
    best, measured, misses = answer
    assert len(best) == 3
    assert misses == 0
    assert 0 < measured < 10
    by_time = [layout for layout, _ in sorted(fitting, key=lambda one: one[1][0])]
    assert set(best) <= ties if len(ties) >= 3 else ties < set(best) <= {*ties, *by_time[:3]}
    prices = dict(fitting)
    chosen = [prices[layout][1] for layout in best if layout in ties]
    assert chosen == sorted(prices[layout][1] for layout in ties)[: len(chosen)]


SPLITS = {
    "schedules in a V-shape have vpp 2",
    "schedules in a V-shape divide layers evenly",
    "layers are divisible by pp x vpp, so no stage has fewer",
    "layers are not divisible by pp x vpp",
    "more stages than layers",
}
"""What a start divides in its own way; other layouts have the flags for it, or none needs it."""


@pytest.mark.slow
def test_a_start_accepts_what_is_proposed_and_no_more(ranks):
    options = {"setup": SETUP, "backend": None}
    proposed = {
        **{"tp": (2, 4), "cp": (1, 2), "pp": (1, 2, 4), "vpp": (1, 2), "mbs": (1, 2)},
        **{"split": ("even", "ends"), "schedule": (None, "zb-h1", "zb-v", "dualpipev")},
    }
    (answers,) = ranks(1, search_jobs.refused, ARGV, DEVICES, proposed, **options)
    assert len(answers) > 30
    assert [one for one in answers if one[1]] == []
    beyond = {
        **{"tp": (1, 3, 8), "cp": (1, 4), "pp": (1, 2, 3), "vpp": (1, 3), "mbs": (1, 3)},
        **{"split": ("even", "ends"), "schedule": (None, "dualpipev")},
    }
    ((tried, accepted),) = ranks(1, search_jobs.accepted_outside, ARGV, DEVICES, beyond, **options)
    assert tried > 100
    assert [one for one in accepted if one[0] not in SPLITS] == []


@pytest.mark.slow
def test_a_signal_ends_a_plan_with_the_best_so_far(ranks):
    values = {"tp": [1, 2], "recompute": [Recompute()]}
    (answer,) = ranks(1, search_jobs.interrupted, ARGV, DEVICES, values, setup=SETUP, backend=None)
    interrupted, layouts, child_lives, restored = answer
    assert interrupted
    assert [layout.tp for layout in layouts] == [1]
    assert not child_lives
    assert restored
