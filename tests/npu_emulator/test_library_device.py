"""The library's device layer and Megatron's torch.cuda names, with the real torch_npu."""

from __future__ import annotations

import pytest
import torch

from tests.npu_emulator import library_jobs as jobs

MIB = 1 << 20
SETUP = "tests.npu_emulator.preload_transfer"


@pytest.mark.slow
def test_the_device_answers(npu):
    found = npu(jobs.figures, setup=SETUP)
    assert found["who"] == ("npu", "hccl", 1, 8)
    assert found["repeats"]
    assert found["inside"]
    allocated, peak, reserved, available, total = found["memory"]
    assert MIB <= allocated <= peak <= reserved < 32 * MIB
    assert total - 64 * MIB < available < total == 64 << 30
    allocated, peak, reserved = found["after"]
    assert allocated == peak < MIB
    assert reserved < found["memory"][2] or reserved == allocated
    assert found["properties"] == ("Ascend910B1", 64 << 30, 24)


@pytest.mark.slow
def test_saved_tensors_wait_in_pinned_host_memory(npu):
    assert npu(jobs.host_copies, setup=SETUP) == {
        "taken": (True, False),
        "pinned": True,
        "device": "npu",
        "equal": True,
        "strides": (1, 6),
        "bytes": (96, 96),
    }


def test_the_names_of_torch_cuda_mean_the_npu(npu):
    found = npu(jobs.cuda_names, setup=SETUP)
    assert found == {
        "device": "npu",
        "is_cuda": True,
        "type for Megatron": "torch.cuda.HalfTensor",
        "type": "torch.npu.HalfTensor",
        "converted": torch.float32,
        "current": 0,
        "capability": (8, 0),
        "compiled for Megatron": False,
        "profiler": 0,
        "memory": True,
        "state": torch.uint8,
        "generators": 8,
        "events": True,
        "after undo": "torch.npu.HalfTensor",
    }


@pytest.mark.slow
def test_sums_in_float64(npu_ranks):
    assert (
        npu_ranks(2, jobs.sums_in_float64, setup=SETUP, backend=None)
        == [["hccl", torch.float64, 4.0, 4.0]] * 2
    )


@pytest.mark.slow
def test_groups_with_options(npu_ranks):
    config = {"group_name": "tp", "hccl_buffer_size": 200}
    assert (
        npu_ranks(2, jobs.options_of_groups, setup=SETUP, backend=None)
        == [(config, ["hccl", [2.0, 2.0]])] * 2
    )
