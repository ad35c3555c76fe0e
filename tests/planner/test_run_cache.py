"""Tiny runs on disk: found again by what they depend on, and by nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed.planner.cluster import load_cluster
from tests.support.lazy import Lazy

cache_module = Lazy("mindspeed.planner.count.cache")
figures = Lazy("mindspeed.planner.composed.figures")
tiny = Lazy("mindspeed.planner.composed.tiny_run")


class FakeJob:
    """What the cache reads of a job."""

    argv = ("--bf16",)


def some_run():
    action = tiny.ActionRun("F", 0, 1, 2, -3, 0.1)
    quantity = figures.Quantity
    communication = {
        figures.Figure(quantity.DENSE_BYTES, collective="all_gather"): 10,
        figures.Figure(quantity.WIRE, "F", "TP", 8, "all_gather"): 10,
        figures.Figure(quantity.CALLS, figures.END, "G", 2, "all_reduce"): 1,
        figures.Figure(quantity.WAIT, "B", "TP"): 0.5,
    }
    return tiny.TinyRun(
        Counter(weights=10),
        7,
        2,
        2,
        (action, action),
        11,
        0.5,
        0.25,
        100,
        0,
        Counter(communication),
    )


def point(layers: int = 2):
    return tiny.Point({"num_layers": layers, "recompute_granularity": None}, 2, 0)


def test_a_later_search_finds_a_run(tmp_path) -> None:
    cluster = load_cluster("h100")
    cache_module.RunCache(tmp_path, FakeJob(), cluster).put(point(), some_run())
    again = cache_module.RunCache(tmp_path, FakeJob(), cluster)
    assert again.get(point()) == some_run()
    assert isinstance(again.get(point()).static, Counter)
    assert isinstance(next(iter(again.get(point()).communication)).quantity, figures.Quantity)
    assert again.get(point(3)) is None
    assert cache_module.RunCache(tmp_path, FakeJob(), load_cluster("a100")).get(point()) is None
    other = FakeJob()
    other.argv = ("--fp16",)
    assert cache_module.RunCache(tmp_path, other, cluster).get(point()) is None


@pytest.mark.parametrize("text", ["", "{", "{}", '{"static": 1}'])
def test_a_broken_file_is_a_run_that_was_not_made(tmp_path, text) -> None:
    cache = cache_module.RunCache(tmp_path, FakeJob(), None)
    cache.put(point(), some_run())
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert cache_module.RunCache(tmp_path, FakeJob(), None).get(point()) is None
    assert cache.get(point()) == some_run()  # still in memory
