"""Data-parallel ranks that shuffle one list begin its next epoch at the same step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.installed_repair import with_repair


def read_epoch(self):
    """Like Megatron's sampler: micro-batches of 2 of this rank's part of 10 samples."""
    part = list(range(10))[self.consumed_samples % 6 :][self.rank :: 3]
    for first in range(0, len(part) - 1, 2):
        self.consumed_samples += 6
        yield part[first : first + 2]


@pytest.mark.parametrize("rank", range(3))
def test_ranks_begin_an_epoch_together(rank):
    sampler = SimpleNamespace(
        total_samples=10, consumed_samples=6, micro_batch_times_data_parallel_size=6, rank=rank
    )
    read = with_repair("sampler-epochs", read_epoch, "MegatronPretrainingRandomSampler.__iter__")
    assert list(read(sampler)) == [[rank, rank + 3]]
    assert sampler.consumed_samples == 12
