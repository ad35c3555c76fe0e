"""Two runs are bit-equal: TP 2 with sequence parallelism, DP 2, dropout on."""

from __future__ import annotations

import pytest

from mindspeed.features.registry import resolve
from tests.features.deterministic_ranks import train

SETUP = "tests.support.warm"


@pytest.mark.slow
def test_two_runs_have_the_same_gradients_and_weights_and_another_seed_has_others(ranks):
    first, second, other = (ranks(4, train, seed, setup=SETUP, timeout=150) for seed in (7, 7, 8))
    assert first == second
    assert all(one != another for one, another in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["npu_deterministic", "deterministic_mode"])
def test_ours_and_megatrons_flag_switch_it_on(name):
    assert [feature.name for feature in resolve({name: True}, "cpu").enabled] == ["deterministic"]
