"""Which bytes are composed, and which are counted because they decide."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.errors import PlanError
from mindspeed.planner.count.check import Check, RankCheck
from tests.support.lazy import Lazy

agreement = Lazy("mindspeed.planner.composed.signature")
composed = Lazy("mindspeed.planner.compose.compose")
signatures = Lazy("mindspeed.planner.composed.signature")

LIMIT = 1_000_000


def job(peak: int, error: float) -> object:
    """A composed job whose fullest rank needs ``peak`` bytes."""
    rank = RankCheck((0,), 1, {}, peak, {}, 0, 0, ())
    return composed.Composed(Check(4, (rank,), LIMIT, True), error, SimpleNamespace(seconds=1.0))


@pytest.fixture
def counted(monkeypatch):
    """What whole ranks need, and how often they are counted."""
    calls: list[int | None] = []

    def check(args, limit, *, jobs, progress):
        calls.append(limit)
        return Check(4, (RankCheck((0,), 1, {}, 77, {}, 0, 0, ()),), limit)

    monkeypatch.setattr("mindspeed.planner.compose.compose.check", check)
    return calls


@pytest.mark.parametrize(
    ("peak", "error", "limit", "counts"),
    [
        (900_000, 0.005, LIMIT, False),
        (996_000, 0.005, LIMIT, True),
        (1_004_000, 0.005, LIMIT, True),
        (1_006_000, 0.005, LIMIT, False),
        (999_500, 0.0, LIMIT, True),  # nothing differed, but not all was compared
        (998_500, 0.0, LIMIT, False),
        (996_000, 0.005, None, False),
    ],
)
def test_composed_bytes_do_not_decide_whether_a_job_fits(counted, peak, error, limit, counts):
    one = job(peak, error)
    found = composed.count_where_needed(one, None, None, limit)
    assert counted == [limit] * counts
    assert found.check.fullest.peak == (77 if counts else peak)
    assert found.error == (0.0 if counts else error)
    assert found.prediction is one.prediction


@pytest.mark.parametrize("cluster", [None, "a cluster"])
def test_a_job_that_cannot_be_composed_is_counted_and_timed_whole(counted, monkeypatch, cluster):
    def timed(args, found, where, jobs, progress):
        return where, jobs

    monkeypatch.setattr("mindspeed.planner.time.whole_ranks.predict_whole", timed)
    found = composed.count_where_needed(None, None, cluster, LIMIT, 3)
    assert counted == [LIMIT] and not found.check.composed
    assert (found.error, found.prediction) == (0.0, cluster and (cluster, 3))


def test_bytes_that_do_not_grow_with_layers_count_as_a_part_of_the_job():
    one = signatures.Signature({}, {}, {}, {}, {}, {}, 1, error=0.002, shift=50.0)
    assert one.error_at(10_000.0) == 0.005
    assert one.error_at(100_000.0) == 0.002


def test_bytes_at_the_peak_of_runs_that_grow_count_by_themselves():
    """Between steps a job may have much more than at its peak beyond them."""
    assert agreement.Difference(0.001, 5.0, 100.0).largest == pytest.approx(0.05)
    assert agreement.Difference(0.2, 5.0, 100.0).largest == 0.2


def test_a_job_without_times_says_why(counted, monkeypatch):
    def refused(*given):
        raise PlanError("micro-batches of different sizes\nmore")

    monkeypatch.setattr("mindspeed.planner.time.whole_ranks.predict_whole", refused)
    found = composed.count_where_needed(None, None, "a cluster", LIMIT)
    assert found.check.fullest.peak == 77 and found.prediction is None
    assert found.untimed == "micro-batches of different sizes"
