"""Collectives of npu tensors on two ranks give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from mindspeed.testing import RankError
from tests.npu_emulator import collective_jobs as jobs


def test_every_collective_equals_the_cpu(npu_ranks, ranks):
    expected = ranks(2, jobs.every_collective, "cpu")
    assert npu_ranks(2, jobs.every_collective, "npu") == expected


def test_every_collective_of_an_hccl_group_equals_the_cpu(npu_ranks, ranks):
    expected = ranks(2, jobs.every_collective, "cpu")
    got = npu_ranks(2, jobs.every_collective_of_hccl, backend=None)
    assert got == [("hccl", results) for results in expected]


def test_an_hccl_group_refuses_cpu_tensors(npu_ranks):
    with pytest.raises(RankError, match="No backend type associated with device type cpu"):
        npu_ranks(2, jobs.cpu_tensors_of_hccl, backend=None)


def test_gradients_pass_through_collectives(npu_ranks):
    # d/dx of the sum over ranks of (1 + rank) times the same total: (1 + 2) * 2 x
    assert npu_ranks(2, jobs.gradients_through_collectives) == [[12.0, 12.0], [18.0, 18.0]]


def test_products_fused_with_a_collective(npu_ranks):
    (x0, w0, got0), (x1, w1, got1) = npu_ranks(2, jobs.fused_products, backend=None)
    total = x0 @ w0 + x1 @ w1
    both = torch.cat((x0, x1))
    expected0 = [total, total[:2], both @ w0, both]
    expected1 = [total, total[2:], both @ w1, both]
    torch.testing.assert_close(got0, expected0)
    torch.testing.assert_close(got1, expected1)
