"""A step with experts: FakeTensors and real ranks that route alike count the same, to the byte."""

from __future__ import annotations

import pytest

from tests.planner.expert_counts import compare

EP2 = "--expert-model-parallel-size 2"
SHARED = "--moe-shared-expert-intermediate-size 32"
SLICED = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 --bf16 "
    "--use-distributed-optimizer"
)
CASES = {
    "alltoall": (4, EP2, [0, 3], 1.0),
    "local": (4, f"{EP2} --transformer-impl local", [3], 1.0),
    "sliced": (8, f"{EP2} {SLICED}", [0, 5], 1.0),
    "fused": (4, f"{EP2} --moe-permute-fusion --moe-router-fusion", [1], 1.0),
    "allgather": (4, f"{EP2} --moe-token-dispatcher-type allgather", [0, 3], 1.0),
    "dropped": (4, f"{EP2} --moe-expert-capacity-factor 1.0", [0, 3], 1.25),
    "overlap": (4, f"{EP2} --moe-alltoall-overlap-comm {SHARED}", [0, 3], 1.0),
    "async": (4, f"{EP2} --moe-permutation-async-comm", [0], 1.0),
    "zero memory": (4, f"{EP2} --moe-alltoall-overlap-comm --moe-zero-memory level0", [0], 1.0),
    "zero memory 1": (4, f"{EP2} --moe-alltoall-overlap-comm --moe-zero-memory level1", [0], 1.0),
    "adaptive": (4, f"{EP2} --moe-adaptive-recompute-activation", [0], 1.0),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_fake_equals_real(ranks, case: str) -> None:
    world, flags, chosen, imbalance = CASES[case]
    assert compare(ranks, world, flags, chosen, imbalance) == {}
