"""The rule by which planning routes tokens: loads, different experts, groups; and known values."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import Lazy
from tests.support.values import values

routing = Lazy("mindspeed.planner.count.balanced_routing")


def _loads(choice: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.bincount(choice.reshape(-1), minlength=experts)


@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 333])
@pytest.mark.parametrize(
    ("experts", "topk", "ranks"), [(8, 2, 4), (64, 6, 8), (4, 4, 2), (3, 1, 1)]
)
def test_loads_differ_by_one(tokens: int, experts: int, topk: int, ranks: int) -> None:
    choice = routing.Balance(experts, topk, ranks).choice(tokens)
    assert choice.shape == (tokens, topk)
    assert all(len(set(row)) == topk for row in choice.tolist())
    loads = _loads(choice, experts)
    assert loads.sum() == tokens * topk
    assert loads.max() - loads.min() <= 1
    by_rank = loads.view(ranks, -1).sum(1)  # what does not divide goes to different ranks
    assert by_rank.max() - by_rank.min() <= 1


@pytest.mark.parametrize("imbalance", [1.25, 2.0])
def test_the_first_rank_has_a_multiple_of_the_mean(imbalance: float) -> None:
    tokens, experts, topk, ranks = 320, 16, 4, 4
    choice = routing.Balance(experts, topk, ranks, imbalance).choice(tokens)
    assert all(len(set(row)) == topk for row in choice.tolist())
    loads = _loads(choice, experts).view(ranks, -1)
    mean = tokens * topk / ranks
    assert loads[0].sum() == imbalance * mean
    others = loads[1:].sum(1)
    assert others.max() - others.min() <= 1
    assert (loads.amax(1) - loads.amin(1)).max() <= 1


def test_a_token_meets_as_many_ranks_as_with_a_uniform_router() -> None:
    from mindspeed.moe.sizes import chance

    tokens, experts, topk, ranks = 4096, 64, 8, 8
    owner = routing.Balance(experts, topk, ranks).choice(tokens) // (experts // ranks)
    met = torch.zeros(tokens, ranks).scatter_(1, owner, 1.0).sum(1).mean()
    assert met == pytest.approx(ranks * chance(experts, topk, ranks), rel=0.02)


def test_groups_limit_the_experts_of_a_token() -> None:
    choice = routing.Balance(16, 4, 4, 1.0, groups=4, group_topk=2).choice(64)
    assert all(len(set(row)) == 4 for row in choice.tolist())
    assert all(len(set(row)) == 2 for row in (choice // 4).tolist())
    assert _loads(choice, 16).tolist() == [16] * 16


def test_impossible_imbalances_are_refused() -> None:
    from mindspeed.errors import ConfigError

    args = values(
        num_experts=8,
        expert_model_parallel_size=2,
        moe_router_topk=2,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
    )
    with pytest.raises(ConfigError, match=r"imbalance of 2.5 .* from 1 to 2"):
        routing.Balance.of(args, 2.5)
    assert routing.Balance.of(args, 1.5) == routing.Balance(8, 2, 2, 1.5)
