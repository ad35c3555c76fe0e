"""Changes of a job: which are tried, what they do to its flags, and which help most."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import options
from mindspeed.planner.explain.changes import BOTH, MEMORY_ONLY, SPEED, Change, changes
from mindspeed.planner.explain.effects import INTERRUPTED, Effect, effects, most_helpful, nearest
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.bounds import Bound

LAYOUT = Layout(64, 128, tp=2, pp=4)


@dataclass(frozen=True)
class Priced:
    seconds: float
    peak_bytes: float


@dataclass
class Predictor:
    """Bounds, estimates and prices by functions."""

    price: object
    estimate: object = None
    bound: object = lambda change: Bound()

    def __post_init__(self):
        self.estimate = self.estimate or self.price

    def refine(self, change):
        pass


def job(**values):
    flags = {name for one in options("memory").values() for name in one.flags}
    base = dict.fromkeys(flags, False) | {
        "num_experts": None, "recompute_granularity": None, "recompute_method": None,
        "recompute_num_layers": None, "use_distributed_optimizer": True,
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
    assert (
        "distributed optimizer" not in layouts
        and "bf16 weights share the memory of the fp32 ones" in layouts
    )
    assert whats(changes(LAYOUT, job(overlap_grad_reduce=True))).count(
        "gradients are reduced while backward runs"
    ) == 0  # fmt: skip
    assert "nothing is computed again" in whats(changes(LAYOUT, job(recompute_granularity="full")))


def test_a_feature_that_is_on_stays_on():
    found = {one.what: one for one in changes(LAYOUT, job(recompute_norm=True))}
    assert "norms are computed again" not in found
    changed = found["inputs of attention layers wait on the host"].layout
    assert changed.memory == ("recompute-norm", "swap-attention")


def test_attention_that_keeps_its_scores_is_tried_as_one_operator():
    what = "attention is one operator that keeps no scores"
    found = {one.what: one for one in changes(LAYOUT, job())}
    assert found[what].may == BOTH
    given = {name: n for name, n in found[what].differences(LAYOUT).items() if n is not None}
    assert given == {"use_flash_attn": True}
    on = {one.what: one for one in changes(LAYOUT, job(use_flash_attn=True))}
    assert what not in on
    # Another layout's memory features do not take it away.
    other = replace(LAYOUT, memory=("swap-optimizer",)).overrides()
    assert "use_flash_attn" not in other and other["recompute_norm"] is None


def test_what_a_change_may_make_better():
    found = {one.what: one.may for one in changes(LAYOUT, job(recompute_granularity="full"))}
    assert found["nothing is computed again"] == SPEED
    assert found["norms are computed again"] == MEMORY_ONLY
    assert found["tensor parallel size 2 -> 4"] == found["pipeline schedule zb-h1"] == BOTH


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
    now = Priced(3.0, 5.0)
    found = effects(tried, Predictor(price), now, 9, lambda *now: told.append(now))
    assert [(one.refused, one.seconds) for one in found] == [("heads", 0.0), ("", 2.0)]
    assert told == [(0, 2), (1, 2), (2, 2)]


def many(bounds, may=BOTH):
    """Changes named by their number, and the bounds of these."""
    tried = [Change(str(number), LAYOUT, may=may) for number in range(len(bounds))]
    return tried, lambda change: Bound(*bounds[int(change.what)])


def test_what_cannot_be_among_the_best_is_not_predicted():
    """In the order of their bounds, until three are faster than what is left can be."""
    bounds = [(5, 1), (2, 1), (1, 1), (3, 1), (1.5, 70), (4, 1)]
    tried, bound = many(bounds)
    asked = []

    def price(change):
        asked.append(change.what)
        return Priced(bound(change).seconds + 0.5, 1)

    found = effects(tried, Predictor(price, bound=bound), Priced(10, 50), 60)
    assert asked == ["2", "1", "3"] * 2  # estimated, then exactly
    assert [one.skipped for one in found] == [
        "takes at least 5 s", "", "", "", "needs at least 0.000 GiB", "takes at least 4 s",
    ]  # fmt: skip
    assert whats(one.change for one in most_helpful(found, Priced(10, 50), 60)) == ["2", "1", "3"]
    everything = effects(tried, Predictor(price), Priced(10, 50), 60)
    best = most_helpful(everything, Priced(10, 50), 60)
    assert [one.seconds for one in best] == [1.5, 2.0, 2.5]  # also the one with most memory


@pytest.mark.parametrize(("peak", "asked"), [(50, {"speed", "both"}), (70, {"memory", "both"})])
def test_what_a_job_does_not_need_is_not_predicted(peak, asked):
    tried = [Change(may, LAYOUT, may=may) for may in (SPEED, MEMORY_ONLY, BOTH)]
    predicted = []
    price = Predictor(lambda one: predicted.append(one.what) or Priced(1, 1))
    effects(tried, price, Priced(2, peak), 60)
    assert set(predicted) == asked


def test_ctrl_c_keeps_what_was_predicted():
    tried, bound = many([(1, 1), (2, 1), (3, 1)])

    def price(change):
        if change.what == "1":
            raise KeyboardInterrupt
        return Priced(1, 1)

    found = effects(tried, Predictor(price, bound=bound), Priced(10, 1), 60)
    assert [one.skipped for one in found] == ["", INTERRUPTED, INTERRUPTED]


def effect(what, seconds, nbytes, refused=""):
    return Effect(Change(what, LAYOUT), seconds, nbytes, True, refused)


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
        ((2, 50), 95, ["fast, large", "fast"]),
        ((2, 50), 45, ["fast", "small", "slow"]),
        ((2, 50), 9, []),
        ((0.5, 50), 60, []),
        ((1.5001, 50), 60, []),
    ],
    ids=["fits", "all fit", "does not fit", "nothing fits", "nothing is faster", "hardly faster"],
)
def test_the_most_helpful(now, limit, expected):
    found = most_helpful(EFFECTS, Priced(*now), limit)
    assert whats(one.change for one in found) == expected


def test_the_nearest_where_nothing_fits():
    assert nearest(EFFECTS, Priced(2, 50)).change.what == "small"
    assert nearest(EFFECTS, Priced(2, 9)) is None


def test_those_that_help_most_are_exact():
    """Estimates find them; one that turns out worse makes room for what it held back."""
    bounds = [(1, 1), (2, 1), (3, 1), (4, 1), (9, 1)]
    tried, bound = many(bounds)
    prices = {"0": Priced(1, 1), "1": Priced(2, 99), "2": Priced(3, 1), "3": Priced(4, 1)}
    estimated, exact = [], []

    def estimate(change):
        estimated.append(change.what)
        return Priced(prices[change.what].seconds, 1)

    def price(change):
        exact.append(change.what)
        return prices[change.what]

    found = effects(tried, Predictor(price, estimate, bound), Priced(8, 50), 60)
    assert estimated == ["0", "1", "2", "3"] and sorted(exact) == ["0", "1", "2", "3"]
    best = most_helpful(found, Priced(8, 50), 60)
    assert [(one.change.what, one.exact) for one in best] == [(n, True) for n in "023"]
    assert found[4].skipped == "takes at least 9 s"


def test_an_estimate_near_the_limit_is_made_exact():
    tried, _ = many([(1, 1)])
    found = effects(
        tried,
        Predictor(lambda one: Priced(1, 59), lambda one: Priced(1, 61)),
        Priced(8, 50),
        60,
    )
    assert [(one.peak_bytes, one.exact) for one in found] == [(59, True)]
