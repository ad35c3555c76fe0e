"""Which jobs are composed, and which are counted whole."""

from __future__ import annotations

import pytest

from mindspeed.errors import PlanError
from mindspeed.planner.count.check import Check, RankCheck
from tests.support.lazy import Lazy

composed = Lazy("mindspeed.planner.compose.compose")

LIMIT = 1_000_000


@pytest.fixture
def counted(monkeypatch):
    """What whole ranks need, and how often they are counted."""
    calls: list[int | None] = []

    def check(args, limit, *, jobs, progress):
        calls.append(limit)
        return Check(4, (RankCheck((0,), 1, {}, 77, {}, 0, 0, ()),), limit)

    monkeypatch.setattr("mindspeed.planner.compose.compose.check", check)
    return calls


@pytest.mark.parametrize("cluster", [None, "a cluster"])
def test_a_job_that_cannot_be_composed_is_counted_and_timed_whole(counted, monkeypatch, cluster):
    def timed(args, found, where, jobs, progress):
        return where, jobs

    monkeypatch.setattr("mindspeed.planner.time.whole_ranks.predict_whole", timed)
    found = composed.count_whole(None, cluster, LIMIT, 3)
    assert counted == [LIMIT] and not found.check.composed
    assert found.prediction == (cluster and (cluster, 3))


def test_a_job_without_times_says_why(counted, monkeypatch):
    def refused(*given):
        raise PlanError("micro-batches of different sizes\nmore")

    monkeypatch.setattr("mindspeed.planner.time.whole_ranks.predict_whole", refused)
    found = composed.count_whole(None, "a cluster", LIMIT)
    assert found.check.fullest.peak == 77 and found.prediction is None
    assert found.untimed == "micro-batches of different sizes"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Et|(tt|)*2L", "Et|tt|tt|L", True),
        ("Ett*2|t*3,mL", "Ettt|tttmL", True),
        ("Et|(tt|)*2L", "Ett|(tt|)*2L", False),
        ("EtmL|t", "Et|tmL", False),
    ],
)
def test_stages_of_a_layout_are_compared_not_its_words(one, other, same):
    from mindspeed.planner.compose.compose import _same

    name = "pipeline_model_parallel_layout"
    assert _same({name: one}, {name: other}, name) is same
