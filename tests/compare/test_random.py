"""Random states are told apart, whichever kind of tracker a job has."""

from __future__ import annotations

import pytest
import torch

from mindspeed.compare.megatron_random import random_states
from tests.support.lazy import needs

needs("megatron.core")


@pytest.mark.parametrize("graphs", [False, True], ids=["states", "generators"])
def test_a_number_that_is_drawn_changes_the_digest(graphs, monkeypatch):
    """A tracker that CUDA graphs can capture has generators in the place of states."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    generator = torch.Generator().manual_seed(5)

    def digests():
        states = {"model-parallel-rng": generator if graphs else generator.get_state()}
        monkeypatch.setattr(get_cuda_rng_tracker(), "states_", states)
        return random_states()

    before = digests()
    assert digests() == before
    torch.rand(1, generator=generator)
    after = digests()
    assert {name for name in before if before[name] != after[name]} == {"model-parallel-rng"}
