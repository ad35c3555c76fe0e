"""Groups of Megatron get the HCCL buffers that the flags name; the job trains."""

from __future__ import annotations

import pytest

from tests.npu_emulator import buffer_jobs
from tests.support.lazy import needs

needs("megatron.core")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(npu_pool):
    flags = "--tensor-model-parallel-size 2 --hccl-group-buffer-adaptive --hccl-op-mode tp:3 "
    flags += "--hccl-group-buffer dp:100"
    return npu_pool.run(
        2, buffer_jobs.options_of_groups, flags.split(), backend=None, timeout=240,
        setup="tests.npu_emulator.preload_trainer",
    )  # fmt: skip


def test_groups_have_their_own_options(found):
    for one in found:
        groups = one["groups"]
        assert one["iteration"] == 3
        # 32 tokens, 2 samples, hidden size 32: less than a megabyte.
        assert groups["TENSOR_MODEL_PARALLEL_GROUP"] == {
            "group_name": "tp", "hccl_buffer_size": 1, "hccl_op_expansion_mode": 3,
        }  # fmt: skip
        assert groups["DATA_PARALLEL_GROUP"] == {"group_name": "dp", "hccl_buffer_size": 100}
        assert groups["MODEL_PARALLEL_GROUP"] == {"group_name": "mp", "hccl_buffer_size": 10}
        assert groups["DATA_PARALLEL_GROUP_WITH_CP"] is None


def test_the_sum_is_printed_once(found):
    lines = [[li for li in one["text"].splitlines() if "HCCL buffers of" in li] for one in found]
    assert [len(one) for one in lines] == [1, 0]
    words = lines[0][0].replace(",", "").split()
    groups, after, before = (int(words[i]) for i in (3, 7, 12))
    assert before == groups * 400
    assert 0 < after < before


def test_host_tensors_are_gathered_in_a_world_without_gloo(npu_ranks):
    first, second = npu_ranks(2, buffer_jobs.staged_over_hccl, backend=None)
    assert first["gathered"] == [[float(i) + 100 * rank for i in range(11)] for rank in range(2)]
    assert second["gathered"] is None
    for found in (first, second):
        assert found["scattered"]
        assert found["backends"] == ["hccl", "staged"]
