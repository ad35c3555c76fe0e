"""Forward, backward and recomputation are distinguished, for every checkpoint implementation."""

from __future__ import annotations

import pytest
import torch

from mindspeed.instruments.instrument import PhaseTracker
from tests.instruments.phase_ranks import KINDS, all_phases

FORWARD = ["function", "no_grad", "call"]
BACKWARD = [("backward", "backward"), ("call", "backward")]


@pytest.fixture(scope="module")
def found(rank_pool):
    (result,) = rank_pool.run(1, all_phases, setup="tests.support.warm", timeout=240)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_forward_backward_and_recomputation_are_distinguished(kind, found):
    repeated = [] if kind in ("none", "double backward") else [(w, "recompute") for w in FORWARD]
    assert found[kind] == [*((what, "forward") for what in FORWARD), *repeated, *BACKWARD]


def test_torch_is_restored():
    regions = (torch.enable_grad, torch.set_grad_enabled)
    before = [vars(region).copy() for region in regions]
    with PhaseTracker(), PhaseTracker():
        assert [vars(region) for region in regions] != before
    assert [vars(region) for region in regions] == before
