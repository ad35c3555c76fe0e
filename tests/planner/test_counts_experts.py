"""A step with experts: FakeTensors and real ranks that route alike count the same, to the byte."""

from __future__ import annotations

import pytest

from tests.planner.expert_counts import compare

EP2 = "--expert-model-parallel-size 2"
EP4 = "--expert-model-parallel-size 4"
CAPACITY = "--moe-expert-capacity-factor 1.0"
DEEPSPEED = f"{EP2} --moe-model-type deepspeed_moe"
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
    "dropped": (4, f"{EP2} {CAPACITY}", [0, 3], 1.25),
    "overlap": (4, f"{EP2} --moe-alltoall-overlap-comm {SHARED}", [0, 3], 1.0),
    "async": (4, f"{EP2} --moe-permutation-async-comm", [0], 1.0),
    "zero memory": (4, f"{EP2} --moe-alltoall-overlap-comm --moe-zero-memory level0", [0], 1.0),
    "zero memory 1": (4, f"{EP2} --moe-alltoall-overlap-comm --moe-zero-memory level1", [0], 1.0),
    "adaptive": (4, f"{EP2} --moe-adaptive-recompute-activation", [0], 1.0),
    "padded": (4, f"{EP2} {CAPACITY} --moe-pad-expert-input-to-capacity", [0], 1.0),
    "once to a rank": (4, f"{EP4} --moe-alltoall-exchange dedup", [0, 3], 1.5),
    "uneven": (4, f"{EP4} --bf16 --use-distributed-optimizer", [0, 3], 1.5),
    "whole experts": (
        4,
        f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --moe-tp-extend-ep",
        [0, 3],
        1.0,
    ),
    "drawn experts": (
        4,
        f"{DEEPSPEED} --moe-train-capacity-factor 1.1 --noisy-gate-policy RSample",
        [0],
        1.0,
    ),
    "predicted room": (4, f"{DEEPSPEED} --moe-no-drop --moe-dynamic-padding", [0], 1.0),
    "ampipe": (4, f"{EP2} --ampipe-degree 2 --use-flash-attn", [3], 1.0),
    "hot": (4, f"{EP2} --balanced-moe-experts --balanced-moe-hot-expert-num 1", [0], 1.25),
    "pieces": (4, f"{EP2} --use-pipe-experts --pipe-experts-multi-data 2", [0], 1.0),
    "multi-token prediction": (4, f"{EP2} --mtp-num-layers 1", [3], 1.0),
    "ZeRO 2": (4, f"{EP2} --zero-stage 2", [0], 1.0),
    "ZeRO 3": (4, f"{EP2} --zero-stage 3", [0], 1.0),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_fake_equals_real(ranks, case: str) -> None:
    world, flags, chosen, imbalance = CASES[case]
    assert compare(ranks, world, flags, chosen, imbalance) == {}
