"""Recordings on disk: found again by what they depend on, and by nothing else."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed.planner.cluster import load_cluster
from mindspeed.planner.expert_loads import BALANCED
from tests.support.lazy import Lazy

cache_module = Lazy("mindspeed.planner.count.cache")
recordings = Lazy("mindspeed.planner.count.recording")


class FakeJob:
    """What the cache reads of a job."""

    argv, loads = ("--bf16",), BALANCED


def some_run():
    sent = {recordings.Message("TP", 8, "all_gather"): recordings.Traffic(1, 10, 70, 0.5)}
    block = recordings.Block(
        0, recordings.Part.PRE, 0, [4, -4], ["activations"] * 2, 7, 1, 0.5, sent
    )
    row = (recordings.Place("F", 0, 0),)
    static = Counter(weights=10)
    return recordings.Recording(row, (block,), (2,), static, 7, 0, 14, Counter(weights=10))


def point(layers: int = 2, **values: bool):
    overrides = {"num_layers": layers, "recompute_granularity": None}
    return recordings.Point(overrides, 2, 0, **values)


def test_a_later_search_finds_a_run(tmp_path) -> None:
    cluster = load_cluster("h100")
    cache_module.RunCache(tmp_path, FakeJob(), cluster).put(point(), some_run())
    again = cache_module.RunCache(tmp_path, FakeJob(), cluster)
    assert again.get(point()) == some_run()
    assert isinstance(again.get(point()).static, Counter)
    assert again.get(point(bare=True)) is None and again.get(point(forward=False)) is None
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
