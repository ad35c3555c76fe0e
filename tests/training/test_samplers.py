"""Samplers read in Megatron-LM's order, and continue where a stopped run was."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, islice

import pytest

from mindspeed.errors import DataError
from tests.support.lazy import Lazy, needs

needs("megatron.core")

CyclicSampler = Lazy("mindspeed.training.batches", "CyclicSampler")
SamplerConfig = Lazy("mindspeed.training.batches", "SamplerConfig")
SequentialSampler = Lazy("mindspeed.training.batches", "SequentialSampler")
SizedSampler = Lazy("mindspeed.training.batches", "SizedSampler")


def config(rank: int = 0, consumed: int = 0, total: int = 22) -> SamplerConfig:
    return SamplerConfig(total=total, consumed=consumed, micro_batch_size=2, rank=rank, ranks=2)


def test_sequential_ranks_take_turns_and_drop_the_incomplete_end():
    assert list(SequentialSampler(config(0, total=11))) == [[0, 1], [4, 5]]
    assert list(SequentialSampler(config(1, total=11))) == [[2, 3], [6, 7]]
    assert list(SequentialSampler(config(1, total=12))) == [[2, 3], [6, 7], [10, 11]]


def test_sequential_continues_after_the_consumed_samples():
    whole = list(SequentialSampler(config(1)))
    assert list(SequentialSampler(config(1, consumed=8))) == whole[2:]


@pytest.mark.parametrize("consumed, total", [(20, 22), (0, 3)])
def test_sequential_without_a_whole_micro_batch_left_is_an_error(consumed, total):
    with pytest.raises(DataError, match="less than one micro-batch"):
        SequentialSampler(config(consumed=consumed, total=total))


# Recorded from MegatronPretrainingRandomSampler of Megatron-LM core_v0.16.1, 22 samples, 2 ranks.
RECORDED = {
    (True, 0): [[4, 1], [7, 5], [3, 9], [0, 8], [6, 2], [5, 6], [1, 2], [0, 8], [9, 3], [7, 4]],
    (True, 1): [
        [14, 11],
        [17, 15],
        [13, 19],
        [10, 18],
        [16, 12],
        [15, 16],
        [11, 12],
        [10, 18],
        [19, 13],
        [17, 14],
    ],
    (False, 0): [
        [10, 15],
        [11, 9],
        [19, 2],
        [18, 7],
        [6, 17],
        [11, 6],
        [3, 17],
        [15, 9],
        [10, 19],
        [16, 8],
    ],
    (False, 1): [
        [4, 3],
        [5, 20],
        [13, 0],
        [16, 8],
        [14, 1],
        [18, 0],
        [12, 1],
        [7, 5],
        [21, 20],
        [4, 2],
    ],
}


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_reads_each_sample_at_most_once_per_epoch(sharding):
    per_epoch = 22 // 4
    for epoch in range(3):
        seen = []
        for rank in range(2):
            batches = CyclicSampler(config(rank, consumed=20 * epoch), sharding=sharding)
            seen += [index for batch in islice(batches, per_epoch) for index in batch]
        assert len(seen) == len(set(seen)) == 20
        assert set(seen) <= set(range(22))


@pytest.mark.parametrize("sharding", [True, False])
def test_cyclic_ranks_begin_an_epoch_together(sharding):
    """Of 10 samples in micro-batches of 2 three ranks read 6; rank 0 could read 4 alone."""
    for epoch in range(3):
        seen: list[int] = []
        for rank in range(3):
            p = SamplerConfig(total=10, consumed=0, micro_batch_size=2, rank=rank, ranks=3)
            (batch,) = islice(CyclicSampler(p, sharding=sharding), epoch, epoch + 1)
            resumed = CyclicSampler(replace(p, consumed=6 * epoch), sharding=sharding)
            assert next(iter(resumed)) == batch
            seen += batch
        assert len(set(seen)) == 6


@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize("steps", [1, 4, 5, 7])
def test_cyclic_continues_after_the_consumed_samples_across_epochs(sharding, steps):
    straight = list(islice(CyclicSampler(config(1), sharding=sharding), 12))
    resumed = CyclicSampler(config(1, consumed=4 * steps), sharding=sharding)
    assert list(islice(resumed, 12 - steps)) == straight[steps:]


@pytest.mark.parametrize("sharding, rank", RECORDED)
def test_cyclic_order_is_megatron_lms(sharding, rank):
    sampler = CyclicSampler(config(rank), sharding=sharding)
    assert list(islice(sampler, 10)) == RECORDED[sharding, rank]


def test_other_sizes_have_the_same_samples_step_by_step():
    equal, sizes = list(SequentialSampler(config(1, total=40))), (1, 3, 1, 3)
    sized = list(SizedSampler(SequentialSampler(config(1, total=40)), sizes))
    assert [len(batch) for batch in sized] == [1, 3] * 5
    assert list(chain(*sized)) == list(chain(*equal))
    resumed = SizedSampler(SequentialSampler(config(1, consumed=16, total=40)), sizes)
    assert list(resumed) == sized[4:]


def test_an_incomplete_last_micro_batch_is_left_out_with_other_sizes_too():
    sized = list(SizedSampler(SequentialSampler(config(1, total=12)), (1, 4, 1)))
    assert sized == [[2], [3, 6, 7, 10], [11]]
    assert list(SizedSampler(SequentialSampler(config(1, total=12)), (4, 4))) == [[2, 3, 6, 7]]
