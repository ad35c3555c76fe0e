"""Experts are filled up with the tokens that Megatron's dispatcher adds."""

from __future__ import annotations

import torch

from mindspeed.moe.layer.call import filled_up
from tests.moe import layer_ranks as jobs
from tests.moe.test_overlap import ADAPTOR
from tests.support.lazy import needs

needs("megatron.core")


def test_equal_to_megatrons_map(ranks):
    generator = torch.Generator().manual_seed(1)
    maps = [torch.rand(tokens, 6, generator=generator) < 0.3 for tokens in (1, 20, 64)]
    for routing_map in maps:
        routing_map[:, 2] = False
    (expected,) = ranks(1, jobs.padded_maps, maps, 16, setup=ADAPTOR)
    found = [filled_up(routing_map, 16) for routing_map in maps]
    assert all(map(torch.equal, found, expected))
    assert not found[-1].sum(0).fmod(16).any()
    assert not found[-1][:, 2].any()
