"""A distributed-optimizer checkpoint resumes exactly, without Transformer Engine or apex."""

from __future__ import annotations

import pytest

from mindspeed.testing import RankError
from tests.support.lazy import needs
from tests.te import checkpoint_ranks

needs("megatron.core")


@pytest.mark.weekly_cases(
    "dp_reshardable-bf16",
    "dp_reshardable-bf16-precision-aware",
    "fully_reshardable-fp32",
    "fully_reshardable-bf16-moments",
)
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", checkpoint_ranks.OPTIONS)
@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_training_resumes_identically(ranks, tmp_path, name, sharding):
    results = ranks(
        2,
        checkpoint_ranks.resume,
        checkpoint_ranks.OPTIONS[name],
        str(tmp_path),
        sharding,
        setup="tests.support.warm",
        timeout=240,
    )
    for result in results:
        assert result["actual"] == result["expected"]
        assert set(result["steps"]) == {5}
        assert all(result["equal"])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_a_custom_update_rule_resumes_identically(ranks, tmp_path, sharding):
    options = checkpoint_ranks.OPTIONS["bf16-precision-aware"]
    results = ranks(
        2,
        checkpoint_ranks.resume_with_signs,
        options,
        str(tmp_path),
        sharding,
        setup="tests.support.warm",
        timeout=240,
    )
    for result in results:
        assert result["actual"] == result["expected"] and all(result["equal"])
        assert set(result["steps"]) == {5}


@pytest.mark.slow
def test_without_the_repair_fp32_does_not_load_its_own_layout(ranks, tmp_path):
    with pytest.raises(RankError, match="a view of a leaf Variable that requires grad"):
        ranks(
            2,
            checkpoint_ranks.resume,
            checkpoint_ranks.OPTIONS["fp32"],
            str(tmp_path),
            "dp_reshardable",
            False,
            setup="tests.support.warm",
            timeout=240,
        )
