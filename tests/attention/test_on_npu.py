"""Plans on NPU tensors: packs of documents are calls that npu_fusion_attention takes."""

from __future__ import annotations

import pytest

from tests.attention import npu_jobs as jobs

CLOSE = 2e-5  # fp32


@pytest.mark.slow
def test_all_ranks_of_a_plan_on_one_device(npu) -> None:
    found = npu(jobs.virtual_ranks)
    assert len(found) == 10
    assert max(found.values()) < CLOSE, found


@pytest.mark.slow
def test_two_ranks(npu_ranks) -> None:
    for found in npu_ranks(2, jobs.real_ranks):
        assert max(found.values()) < CLOSE, found
