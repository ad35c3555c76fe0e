"""Fragmentation: recorded traces, what the policies reserve for them, and the flag."""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.memory.caching_allocator import AllocatorEvent as Event
from mindspeed.memory.fragmentation import AllocationTrace, LongLivedPool, best, simulate, table
from tests.memory import trace_ranks
from tests.support.trainer_job import SETUP

FLAG = "memory_fragmentation"


def test_a_trace_has_each_storage_once():
    x = torch.ones(256)
    trace = AllocationTrace([x, x.view(2, 128)])
    with trace:
        y = x * 2  # a new storage
        y.add_(1)
        y.view(-1)[:3].neg()  # 3 elements
        del y
    with trace, trace.long_lived():
        z = torch.zeros(8)
    del z  # frees are seen afterwards, too
    assert trace.events == [
        Event(0, 1024, True), Event(1, 1024), Event(2, 12), Event(2, 0), Event(1, 0),
        Event(3, 32, True), Event(3, 0),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def traces(rank_pool):
    """Steps of a GPT of today's operators on FakeTensors: equal and varying lengths."""
    (found,) = rank_pool.run(1, trace_ranks.traces, setup=SETUP, timeout=240)
    return {name: simulate(events) for name, events in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "fragmentation"),
    [
        ("equal", {"off": 2.2, "pools": 2.5, "expandable": 1.2}),
        ("varying", {"off": 2.7, "pools": 2.9, "expandable": 1.3}),
    ],
)
def test_fragmentation_of_a_gpt(traces, lengths, fragmentation):
    found = {name: round(100 * peak.fragmentation, 1) for name, peak in traces[lengths].items()}
    assert found == fragmentation
    assert best(traces[lengths]) == "expandable"


def test_pools_win_where_a_state_takes_the_place_of_an_activation():
    """Neither policy wins everywhere."""
    mib = 2**20
    events = [
        Event(0, 40 * mib), Event(1, 40 * mib), Event(0, 0), Event(2, 6 * mib, True),
        Event(3, 40 * mib),
    ]  # fmt: skip
    peaks = simulate(events)
    assert best(peaks) == "pools"
    assert table(peaks).splitlines()[-1] == "least is reserved with --memory-fragmentation pools"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--memory-fragmentation", "auto"], []])
def test_training_prints_the_table_once_and_its_losses_are_the_same(ranks, flags):
    env = {} if flags else {"MEMORY_FRAGMENTATION": "1"}
    ((result, text),) = ranks(1, trace_ranks.train, flags, setup=SETUP, env=env, timeout=200)
    ((plain, silent),) = ranks(1, trace_ranks.train, [], setup=SETUP, timeout=200)
    assert result == plain and result["error"] is None
    assert "fragmentation" not in silent
    (row,) = re.findall(r"^off +([\d.]+) +([\d.]+) +([\d.]+) %$", text, re.MULTILINE)
    assert 0 < float(row[0]) < float(row[1])
    assert len(re.findall("least is reserved with --memory-fragmentation", text)) == 1


@pytest.mark.parametrize("policy", ["expandable", "pools"])
def test_refused_on_the_cpu(policy):
    with pytest.raises(ConfigError) as error:
        resolve({FLAG: policy}, "cpu")
    assert str(error.value) == (
        f"--memory-fragmentation {policy}: the cpu has no caching allocator; "
        "--memory-fragmentation auto prints a simulation"
    )


def test_variable_of_the_original(monkeypatch):
    def names():
        return [feature.name for feature in resolve({}, "cpu").enabled]

    for value, on in (("1", True), ("auto", True), ("0", False), ("off", False)):
        monkeypatch.setenv("MEMORY_FRAGMENTATION", value)
        assert ("memory-fragmentation" in names()) is on
    monkeypatch.setenv("MEMORY_FRAGMENTATION", "yes")
    with pytest.raises(ConfigError, match="MEMORY_FRAGMENTATION='yes'"):
        names()


def test_pool_is_in_use_while_states_are_allocated():
    used = []

    class Pool:
        def __enter__(self):
            used.append("in")

        def __exit__(self, *error):
            used.append("out")

    class Optimizer:
        def step(self):
            used.append("step")

    pool = LongLivedPool(Pool)
    assert pool.before_model({"config": 1}) == {"config": 1}
    pool.before_model({})  # a second chunk
    used.append("built")
    optimizer = pool.with_optimizer(Optimizer())
    optimizer.step()
    optimizer.step()
    assert used == ["in", "built", "out", "in", "step", "out", "step"]
