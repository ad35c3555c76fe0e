"""Attention of a module over a split sequence, by every strategy, is that of one rank in fp64."""

from __future__ import annotations

from tests.features import context_ranks


def test_output_and_gradients_are_those_of_one_rank(ranks):
    for found in ranks(4, context_ranks.every_strategy, timeout=240):
        for name, errors in found.items():
            for batch, error in errors.items():
                assert error < 1e-12, (name, batch)


def test_second_communicators_are_made_once_and_destroyed(ranks):
    function, setup = context_ranks.second_communicators, "mindspeed.megatron_adaptor"
    for rank, (members, more, left) in enumerate(ranks(4, function, setup=setup, timeout=240)):
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (more, left) == (1, 0)
