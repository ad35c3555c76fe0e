"""Random streams of a tracker that are replayed."""

from __future__ import annotations

import pytest
import torch

from mindspeed.tensor_parallel.random_streams import replayed


class Streams:
    """A tracker whose states are generators that go on in place, or tensors that it replaces."""

    def __init__(self, generators):
        self.generators = generators
        generator = torch.Generator().manual_seed(3)
        self._states = {"a": generator if generators else generator.get_state()}

    def get_states(self):
        return dict(self._states)

    def set_states(self, states):
        self._states = states

    def draw(self):
        if self.generators:
            return torch.rand(4, generator=self._states["a"])
        generator = torch.Generator()
        generator.set_state(self._states["a"])
        drawn = torch.rand(4, generator=generator)
        self._states["a"] = generator.get_state()
        return drawn


@pytest.mark.parametrize("generators", [False, True])
def test_every_recomputation_draws_the_numbers_of_its_forward(generators):
    streams, expected = Streams(generators), Streams(generators)
    forward, recomputation = replayed(streams)
    with forward:
        first = streams.draw()
    second = streams.draw()
    for _ in range(2):
        with recomputation:
            assert torch.equal(streams.draw(), first)
    third = streams.draw()
    assert all(torch.equal(one, expected.draw()) for one in (first, second, third))
