"""Context-parallel attention over gloo, against scores written out in float64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from mindspeed.attention import (
    HeadAllToAll,
    Mask,
    Region,
    WrongPlanError,
    context_parallel_attention,
    contiguous,
    cost_metrics,
    executor,
    planners,
    zigzag,
)
from mindspeed.errors import ConfigError
from tests.attention import gloo_ranks as jobs

EXACT = 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("documents", [(0, 48), (0, 1, 20, 48)])
def test_algorithms(ranks, size: int, documents: tuple[int, ...]) -> None:
    for found in ranks(size, jobs.algorithms, documents, timeout=120):
        assert all(error < EXACT and counted for error, counted in found.values()), found


@pytest.mark.slow
def test_ulysses_of_any_length_and_number_of_heads(ranks) -> None:
    for found in ranks(4, jobs.every_ulysses, timeout=120):
        assert max(found.values()) < EXACT, found


class TestKeysBeforeTheExchange:
    """2 key heads on 4 ranks: after the exchange, twice the bytes of keys and values."""

    keys = 64 // 4 * 2 * 8 * 8  # bytes of a rank's keys, or of its values

    def test_gradients_bytes_and_memory(self, ranks) -> None:
        for plain, half, full in ranks(4, jobs.ulysses_cache):
            assert plain[0] == half[0] == full[0]
            queries, sent_keys = 4 * self.keys, 2 * 2 * self.keys  # KV' = 2 KV
            each = 3 * (2 * queries + sent_keys) // 4
            assert plain[1] == [each, each]
            assert half[1] == [each, each + 3 * sent_keys // 8]
            assert full[1] == [each, each + 3 * sent_keys // 4]
            assert [found[2] for found in (plain, half, full)] == [4, 5, 5]
            assert plain[3] - half[3] == self.keys  # (U / g - 1) K
            assert plain[3] - full[3] == 2 * self.keys

    def test_one_rank_sends_nothing(self) -> None:
        split = HeadAllToAll(contiguous(8, 2), 0, None)
        k = torch.zeros(4, 4, 8)
        with pytest.raises(ConfigError, match="n_kv=4 over CP=2 repeats none"):
            split.kv_cache(8, k, k, "full")
        with pytest.raises(ConfigError, match="policy 'most' is not one of full, half"):
            split.kv_cache(8, k, k, "most")


@pytest.mark.parametrize(("heads", "size", "before"), [(28, 8, 0.875), (40, 16, 40 / 48)])
def test_leftover_heads_are_split_by_query_rows(heads: int, size: int, before: float) -> None:
    split = HeadAllToAll(zigzag(960, size), 0, None)
    assert split.balance(heads) == pytest.approx(before)
    area = cost_metrics(planners.ring(Mask.causal(960), split.sharding)).area
    even, left = heads // size, heads % size
    work = [even * Mask.causal(960).area() + left * mine for mine in area]
    assert sum(work) == heads * Mask.causal(960).area()
    assert sum(work) / size / max(work) == 1.0


def test_hybrid_of_heads_and_ring(ranks) -> None:
    for errors in ranks(4, jobs.hybrid, 2):
        assert max(errors) < EXACT


def test_dropout_is_drawn_again_for_the_backward_pass(ranks) -> None:
    results = ranks(2, jobs.dropout)
    for mean, analytic, difference in results:
        assert mean == pytest.approx(1.0, abs=0.05)  # kept ones are scaled up
        assert analytic == pytest.approx(difference, rel=1e-6)
    assert any(mean != 1.0 for mean, _, _ in results)


def test_sizes_that_do_not_divide_are_refused(ranks) -> None:
    for messages in ranks(2, jobs.wrong_sizes):
        assert messages[0].startswith("ConfigError: q is [3, 2, 8], must be [4, heads, head size]")
        assert "do not fit" in messages[1] and "do not fit" in messages[2]
        assert messages[3] == "ConfigError: the plan is for 4 ranks, the group has 2"


def test_plans_that_differ_between_ranks_are_refused(ranks) -> None:
    env = {"MINDSPEED_CHECK_PLAN": "1"}
    for message in ranks(2, jobs.disagreement, env=env, timeout=120):
        assert re.fullmatch(
            r"plans differ between CP ranks: \w{12} vs \w{12} \(same cu_seqlens on every rank\?\)",
            message,
        )


def test_a_plan_that_does_not_cover_its_mask_is_refused_before_any_work(monkeypatch) -> None:
    plan = planners.ring(Mask.causal(8), contiguous(8, 1))
    short = replace(plan, forward=(replace(plan.forward[0], work=((Region(0, 8, 0, 1),),)),))
    monkeypatch.setattr(executor.kernels, "forward", lambda *_: pytest.fail("a kernel ran"))
    x = torch.zeros(8, 1, 8)
    with pytest.raises(WrongPlanError, match="ring: forward computes 8 pairs, the mask has 36"):
        context_parallel_attention(x, x, x, short)


def test_a_rank_that_fails_stops_the_others(ranks) -> None:
    """The closed connection does, long before a timeout of 30 minutes."""
    *others, last = ranks(3, jobs.failing_rank, timeout=120)
    assert last == "out of memory in the kernel"
    assert all("closed" in message.lower() for message in others), others
