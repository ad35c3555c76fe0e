"""Changes of a job: which are tried, what they do to its flags, and which help most."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.planner.changes import Change, Effect, changes, effects, most_helpful
from mindspeed.planner.layout import MEMORY, Layout

LAYOUT = Layout(64, 128, tp=2, pp=4)


@dataclass(frozen=True)
class Priced:
    seconds: float
    peak_bytes: float


def job(**values):
    flags = {name for table in MEMORY.values() for name in table}
    base = dict.fromkeys(flags, False) | {
        "num_experts": None, "recompute_granularity": None, "use_distributed_optimizer": True,
        "overlap_grad_reduce": False, "overlap_param_gather": False,
    }  # fmt: skip
    return Namespace(**(base | values))


def whats(found):
    return [one.what for one in found]


def test_sizes_schedules_memory_and_overlaps_are_tried():
    found = list(changes(LAYOUT, job()))
    assert len(set(whats(found))) == len(found)
    layouts = {one.what: one.layout for one in found}
    assert layouts["tensor parallel size 2 -> 4"] == replace(LAYOUT, tp=4)
    assert layouts["pipeline parallel size 4 -> 2"] == replace(LAYOUT, pp=2)
    assert layouts["pipeline schedule zb-v"] == replace(LAYOUT, schedule="zb-v", vpp=2)
    assert not [what for what in layouts if what.startswith("expert")]
    assert all(one.layout.dp > 0 and one.layout.micro_batches > 0 for one in found)
    assert "distributed optimizer" not in layouts and "reuse-fp32-param" in layouts
    assert whats(changes(LAYOUT, job(overlap_grad_reduce=True))).count(
        "gradients are reduced while backward runs"
    ) == 0  # fmt: skip
    assert "nothing is computed again" in whats(changes(LAYOUT, job(recompute_granularity="full")))


def test_a_feature_that_is_on_stays_on():
    found = {one.what: one for one in changes(LAYOUT, job(recompute_norm=True))}
    assert "recompute-norm" not in found
    assert found["swap-attention"].layout.memory == ("recompute-norm", "swap-attention")


def test_differences_are_the_flags_to_change():
    change = Change("more", replace(LAYOUT, tp=4, vpp=2), {"overlap_grad_reduce": True})
    assert change.differences(LAYOUT) == {
        "tensor_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_grad_reduce": True,
    }  # fmt: skip


def test_a_refused_change_has_its_reason():
    def price(change):
        if change.layout.tp == 4:
            raise ConfigError("heads")
        return Priced(2.0, 5.0)

    tried = [Change("a", replace(LAYOUT, tp=4)), Change("b", LAYOUT)]
    told = []
    found = effects(tried, price, lambda *progress: told.append(progress))
    assert [(one.refused, one.seconds) for one in found] == [("heads", 0.0), ("", 2.0)]
    assert told == [(0, 2), (1, 2), (2, 2)]


def effect(what, seconds, nbytes, refused=""):
    return Effect(Change(what, LAYOUT), seconds, nbytes, refused)


EFFECTS = [
    effect("slow", 3, 20),
    effect("fast, large", 1, 90),
    effect("fast", 1.5, 40),
    effect("small", 2.5, 10),
    effect("refused", 0, 0, "why"),
    effect("same", 2, 50),
]


@pytest.mark.parametrize(
    ("now", "limit", "expected"),
    [
        ((2, 50), 60, ["fast"]),
        ((2, 50), None, ["fast, large", "fast"]),
        ((2, 50), 45, ["fast", "small", "slow"]),
        ((2, 50), 9, ["small", "slow", "fast"]),
        ((0.5, 50), 60, []),
    ],
    ids=["fits", "no limit", "does not fit", "nothing fits", "nothing is faster"],
)
def test_the_most_helpful(now, limit, expected):
    found = most_helpful(EFFECTS, Priced(*now), limit)
    assert whats(one.change for one in found) == expected
