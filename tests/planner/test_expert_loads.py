"""Loads of experts that a plan assumes: the busiest rank, its exchanges, and intervals."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster import load_cluster
from mindspeed.planner.cluster.operations import Operation
from mindspeed.planner.cluster.rates import DeviceRates, Experts, RatedJob
from mindspeed.planner.expert_loads import BALANCED, ExpertLoads, assumed, expert_loads
from tests.support.lazy import Lazy
from tests.support.values import values

Balance = Lazy("mindspeed.planner.count.balanced_routing", "Balance")
prediction = Lazy("mindspeed.planner.time.prediction")


def test_a_number_is_the_load_of_the_busiest_rank() -> None:
    loads = expert_loads("1.5")
    assert [loads.imbalance(ranks) for ranks in (1, 2, 8)] == [1.0, 1.5, 1.5]
    assert BALANCED.imbalance(8) == 1.0


def test_what_is_not_said_may_be_uneven() -> None:
    def more(loads: ExpertLoads, ranks: int, **changes: object) -> float:
        found = {"num_experts": 8, "expert_model_parallel_size": ranks, **changes}
        return loads.more(values(**found))

    assert [more(BALANCED, ranks) for ranks in (1, 8)] == [0.0, 0.25]
    assert more(BALANCED, 8, num_experts=None) == 0.0
    assert more(BALANCED, 8, moe_router_force_load_balancing=True) == 0.0
    assert more(expert_loads("1.0"), 8) == 0.0


def test_a_recorded_routing_has_a_busiest_rank_for_each_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "routing.json"
    file.write_text(json.dumps([[4, 0, 2, 2], [1, 1, 1, 5]]))
    loads = expert_loads(str(file))
    assert loads.imbalance(1) == 1.0
    assert loads.imbalance(2) == pytest.approx((4 / 4 + 6 / 4) / 2)
    assert loads.imbalance(4) == pytest.approx((4 / 2 + 5 / 2) / 2)
    file.write_text("[1, 3]")
    assert expert_loads(str(file)).imbalance(2) == 1.5


@pytest.mark.parametrize("text", ["0.9", "nan", "much", "1e9"])
def test_no_load_of_a_busiest_rank(text: str) -> None:
    with pytest.raises(ConfigError, match=r"busiest rank over the mean, as 1\.25, or FILE\.json"):
        expert_loads(text)


@pytest.mark.parametrize("text", ["{}", "[]", "[[1, 2], 3]", "[-1, 2]", "[0, 0]", "[1.5, 2]"])
def test_a_file_without_tokens_of_experts(text: str, tmp_path: Path) -> None:
    file = tmp_path / "routing.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no list of the tokens of each expert"):
        expert_loads(str(file))


def test_loads_belong_to_a_model_with_as_many_experts() -> None:
    loads = ExpertLoads(tokens=((1, 3),), text="routing.json")
    loads.check(Namespace(num_experts=2))
    with pytest.raises(ConfigError, match="it has 2 experts, the model 4"):
        loads.check(Namespace(num_experts=4))
    with pytest.raises(ConfigError, match="the model has no experts"):
        loads.check(Namespace(num_experts=None))
    with pytest.raises(ConfigError, match="force-load-balancing"):
        loads.check(Namespace(num_experts=2, moe_router_force_load_balancing=True))
    BALANCED.check(Namespace(num_experts=None))


def test_what_is_assumed_is_said() -> None:
    texts = [
        assumed(Namespace(num_experts=8, expert_loads=loads))
        for loads in (
            BALANCED,
            ExpertLoads(1.5, text="1.5"),
            ExpertLoads(tokens=((1,),), text="a.json"),
        )
    ]
    assert "reach to a busiest rank with 1.25 times" in texts[0]
    assert "gets 1.5 times the mean" in texts[1] and "as a.json has" in texts[2]
    forced = Namespace(num_experts=8, moe_router_force_load_balancing=True)
    assert assumed(forced).endswith("by --moe-router-force-load-balancing")
    assert assumed(Namespace(num_experts=None)) == "every sample is one document"


@pytest.mark.parametrize(("ranks", "most"), [(8, 4.0), (4, 2.0), (2, 2.0)])
def test_groups_of_experts_may_be_uneven_too(ranks: int, most: float) -> None:
    """Of 4 groups a token takes 2: a rank has a part of one, one, or two of them."""
    balance = Balance(32, 4, ranks, 1.25, groups=4, group_topk=2)
    assert balance.most == pytest.approx(most if ranks < 8 else 2.0)
    tokens = 640
    choice = balance.choice(tokens)
    assert all(len(set(row)) == 4 for row in choice.tolist())
    assert all(len(set(row)) == 2 for row in (choice // 8).tolist())
    loads = torch.bincount(choice.reshape(-1), minlength=32).view(ranks, -1).sum(1)
    assert loads[0] == pytest.approx(1.25 * tokens * 4 / ranks, abs=2)
    assert loads.sum() == tokens * 4


def exchange(payload: int, own: int) -> Communication:
    ranks = tuple(range(4))
    group = "EXPERT_MODEL_PARALLEL_GROUP"
    return Communication("all_to_all", "0", group, ranks, "forward", payload, payload - own)


@pytest.mark.parametrize("once", [None, Experts(8, 2)])
def test_an_exchange_takes_as_long_as_its_busiest_rank(once: Experts | None) -> None:
    """It gets 1.5 times the mean: what comes in decides on the way there, what goes out back."""
    cluster = replace(load_cluster("generic"), collective_us=0.0)
    cluster = replace(cluster, levels=tuple(replace(one, latency_us=0.0) for one in cluster.levels))
    mean = 4_000_000
    even = DeviceRates(cluster, RatedJob(once=once)).communication(exchange(mean, mean // 4))
    uneven = DeviceRates(cluster, RatedJob(once=once, imbalance=1.5))
    there, back = exchange(mean, 3 * mean // 8), exchange(3 * mean // 2, 3 * mean // 8)
    assert uneven.communication(there) == pytest.approx(1.5 * even)
    assert uneven.communication(back) == pytest.approx(1.5 * even)


def test_seconds_of_products_of_experts_are_known() -> None:
    rates = DeviceRates(load_cluster("h100"))
    one = Operation("aten::mm", 2 * 512**3, 0, (512, 512, 512, "bf16"), dtype="bf16")
    rates.queued(one, 1.0)
    assert rates.routed == 0.0
    rates.queued(replace(one, grouped=True), 2.0)
    assert rates.routed == 2.0


def test_the_slowest_stage_decides_what_uneven_experts_add() -> None:
    shape = Namespace(uneven=0.25)
    more = prediction.more_when_uneven
    assert more([(4.0, 2.0)], shape) == pytest.approx(0.125)
    assert more([(4.0, 0.0), (3.0, 2.0)], shape) == 0.0  # a slower stage hides it
    assert more([(4.0, 0.0), (3.0, 3.0), (4.0, 1.0)], shape) == pytest.approx(0.0625)
    assert more([(0.0, 0.0)], shape) == 0.0
