"""Optimizer states in host memory, on a device whose tensors are not the host's."""

from __future__ import annotations

import pytest
import torch

from mindspeed.testing import RankError
from tests.npu_emulator import state_jobs as jobs

SIZE = 40 * 9 + 130


@pytest.mark.parametrize("kind", ["swap", "mapped"])
def test_states_in_host_memory_train_as_on_the_device(npu, kind):
    plain, found = npu(jobs.train, "npu"), npu(jobs.train, kind)
    assert plain["places"] == {"npu"}
    assert found["places"] == ({"cpu"} if kind == "swap" else {"npu"})
    for name in ("weights", "states"):
        for ours, theirs in zip(found[name], plain[name], strict=True):
            assert torch.equal(ours, theirs)
    assert found["copied"] == (5 * 12 * SIZE if kind == "swap" else 0)


def test_the_device_equals_the_cpu(npu):
    ours, theirs = npu(jobs.train, "npu")["weights"], jobs.train("cpu")["weights"]
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-4)


def test_swapped_memory_cannot_be_copied(npu):
    with pytest.raises(RankError, match="swapped memory"):
        npu(jobs.copy_swapped_memory)
