"""Tensors of the emulated NPU compute, differentiate, count memory and draw numbers."""

from __future__ import annotations

import sys

import pytest
import torch

from mindspeed.device.torch_versions import at_least
from mindspeed.testing import RankError
from tests.npu_emulator import device_jobs as jobs


def test_torch_npu_is_not_imported_in_this_process(npu):
    npu(jobs.write_through_views)
    assert "torch_npu" not in sys.modules
    assert not any("mindspeed-tests" in entry for entry in sys.path)


def test_writes_through_views_reach_the_tensor(npu):
    device, transposed, x = npu(jobs.write_through_views)
    assert device == "npu:0"
    assert transposed.equal(torch.arange(6.0).view(2, 3).t() * 2 + 1)
    assert x.equal(torch.tensor([[7.0, 8, 8], [3, 5, 6]]))


def test_out_arguments_are_sized_and_written(npu):
    fresh, a, strided = npu(jobs.out_arguments)
    assert fresh.equal(torch.tensor([1.0, 2, 3]))
    assert a.equal(torch.tensor([0.0, 3, 6]))
    assert strided.equal(torch.tensor([[0.0, 1], [0, 4], [0, 7]]))


def test_a_tensor_that_grows_keeps_its_values(npu):
    assert npu(jobs.grown_tensors, 300) == 0


@pytest.mark.skipif(not at_least("2.11"), reason="torch_npu 2.11 brought their kernels")
def test_operators_that_only_the_device_has(npu):
    got, expected = npu(jobs.products_in_float32)
    torch.testing.assert_close(got, expected)


def test_a_training_step_equals_the_cpu(npu):
    losses, gradients, parameters = npu(jobs.train, "npu")
    cpu_losses, cpu_gradients, cpu_parameters = jobs.train("cpu")
    assert losses == pytest.approx(cpu_losses, rel=1e-5)
    torch.testing.assert_close(gradients, cpu_gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(parameters, cpu_parameters, rtol=1e-4, atol=1e-4)


def test_memory_is_counted(npu):
    before, during, after, peak, free, total = npu(jobs.memory_figures)
    size = 1 << 20
    assert size <= during - before <= size + 1024
    assert (after, peak) == (before, during)
    assert 0 < total - free < 64 << 20


def test_random_numbers_follow_the_generators_of_the_device(npu):
    alike, unlike = npu(jobs.random_numbers)
    assert all(left.equal(right) for left, right in alike)
    assert not any(left.equal(right) for left, right in unlike)


def test_drawing_on_the_device_leaves_the_cpu_alone(npu):
    expected, got = npu(jobs.random_state_of_the_cpu)
    assert got.equal(expected)


def test_streams_and_events_are_complete(npu):
    assert npu(jobs.streams_and_events) == (True, True, [2.0, 2.0, 2.0])


def test_a_rank_can_use_another_device(npu):
    count, *devices = npu(jobs.second_device)
    assert count == 8
    assert devices == ["npu:1", "npu:1"]


@pytest.mark.parametrize(
    ("job", "name"),
    [
        (jobs.without_kernel, "npu::npu_rotated_iou"),
        (jobs.without_cpu_kernel, "aten::batch_norm_stats"),
    ],
)
def test_an_operator_without_kernel_is_named(npu, job, name):
    with pytest.raises(RankError, match=f"{name} has no kernel in the NPU emulator"):
        npu(job)
