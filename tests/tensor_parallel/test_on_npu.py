"""Fused kernels and aligned operands on an emulated NPU, which checks torch_npu's signatures."""

from __future__ import annotations

import pytest
import torch

from mindspeed.tensor_parallel.products import aligned_right
from mindspeed.tensor_parallel.strategy import Overlap
from tests.npu_emulator import wheel
from tests.tensor_parallel import npu_jobs
from tests.tensor_parallel.npu_jobs import K, N

FUSED = {
    "gather_matmul": "npu::npu_all_gather_base_mm",
    "matmul_scatter": "npu::npu_mm_reduce_scatter_base",
    "matmul_reduce": "npu::npu_mm_all_reduce_base",
}


@pytest.mark.parametrize("comm_mode", [None, "aiv"])
def test_one_kernel_with_the_bytes_of_the_collective(npu_ranks, comm_mode):
    overlap = Overlap(fused=True, comm_mode=comm_mode)
    modes = {"matmul_reduce": None} if wheel.is_old() else {}  # an older one has the default alone
    for found in npu_ranks(2, npu_jobs.products, overlap, 8, K, N, False):
        for name, (equal, calls, sent, expected) in found.items():
            assert equal, name
            assert calls == [(FUSED[name], modes.get(name, comm_mode))]
            assert sent == expected and len(sent) == 1


def test_what_does_not_fit_runs_in_parts(npu_ranks):
    """An inner length below 256; a term that is added before the reduction."""
    for k, addend in ((200, False), (K, True)):
        for found in npu_ranks(2, npu_jobs.products, Overlap(fused=True), 8, k, N, addend):
            for name, (equal, calls, sent, expected) in found.items():
                fits = addend and name == "gather_matmul"
                assert equal, name
                assert len(calls) == len(sent) == (1 if fits else 4)
                assert sum(size for _, size in sent) == sum(size for _, size in expected)


def test_inner_lengths_are_padded_for_the_matrix_unit(npu_ranks):
    """20 columns of bf16 are no multiple of 32 bytes; 256 of them are 512 bytes."""
    overlap = Overlap(parts=2, aligned=True, k_min=8, k_max=64)
    for found in npu_ranks(2, npu_jobs.products, overlap, 512, 20, 256, False):
        for name, (equal, calls, sent, expected) in found.items():
            assert equal, name
            assert [length for _, length in calls] == [256, 256]
            assert sum(size for _, size in sent) == sum(size for _, size in expected)


@pytest.mark.parametrize(
    ("rows", "k", "n", "shape", "strides"),
    [
        (256, 256, 256, (256, 256), (256, 1)),  # everything aligned: as it is
        (100, 256, 256, (256, 256), (1, 256)),  # transposed in memory
        (256, 256, 100, (256, 100), (1, 256)),
        (256, 1040, 256, (1040, 256), (256, 1)),  # a multiple of 32 bytes: as it is
        (256, 1030, 256, (1280, 256), (256, 1)),  # padded to 512 bytes
        (256, 5001, 256, (5001, 256), (256, 1)),  # too long to pad
        (256, 100, 256, (100, 256), (256, 1)),  # too short
        (100, 1030, 256, (1030, 256), (256, 1)),  # rows not aligned: no gain
    ],
)
def test_layout_of_the_right_matrix(rows, k, n, shape, strides):
    b = torch.randn(k, n, dtype=torch.bfloat16)
    found = aligned_right(rows, b)
    assert found.shape == shape and found.stride() == strides
    assert torch.equal(found[:k], b) and not found[k:].any()
