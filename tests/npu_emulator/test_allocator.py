"""The caching allocator of torch_npu, as ``--memory-fragmentation`` uses it."""

from __future__ import annotations

import pytest

from mindspeed.testing import RankError
from tests.npu_emulator import allocator_jobs as jobs

MIB = 2**20


@pytest.mark.slow
def test_long_lived_tensors_have_their_own_segments(npu):
    """3 MiB of states, 8 MiB of activations: once these are freed, so is their segment.

    With torch_npu's queue, as in a real job: without it the allocator keeps the segment.
    """
    found = npu(jobs.long_lived_and_short_lived, env={"TASK_QUEUE_ENABLE": "1"})
    assert found == {"plain": (20 * MIB, 20 * MIB), "pools": (40 * MIB, 20 * MIB)}


@pytest.mark.parametrize("initialized", [False, True])
def test_the_setting_is_made_and_restored(npu, initialized):
    """The emulated driver has no virtual memory, and torch_npu goes on without."""
    found = npu(jobs.expandable, initialized)
    assert found == ([False], "expandable_segments:True", None)


def test_the_setting_reaches_the_allocator(npu):
    with pytest.raises(RankError, match=r"(?s)True.*False"):
        npu(jobs.refused)
