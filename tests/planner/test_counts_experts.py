"""A step with experts: FakeTensors and real ranks that route alike count the same, to the byte."""

from __future__ import annotations

import pytest

from tests.planner.real_and_fake import compare

_EP = "--expert-model-parallel-size 2 "
_EP4 = "--expert-model-parallel-size 4 "
_SHARED = "--moe-shared-expert-intermediate-size 32 "
_TP = "--tensor-model-parallel-size 2 --sequence-parallel "
_PP = "--pipeline-model-parallel-size 2 "
_VIRTUAL = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
_OVERLAP = "--moe-alltoall-overlap-comm "
_DEEPSPEED = "--moe-model-type deepspeed_moe ~--bf16 "
CASES = {
    "alltoall": (4, _EP, [0, 3]),
    "sliced": (
        8,
        _EP + _TP + "--expert-tensor-parallel-size 2 --use-distributed-optimizer",
        [5],
    ),
    "spread over tensor parallel ranks": (4, _EP + _TP + "--moe-tp-extend-ep", [3]),
    "allgather, hidden": (
        4,
        _EP + _TP + "--moe-token-dispatcher-type allgather --moe-allgather-overlap-comm",
        [3],
    ),
    "dropped, unbalanced": (4, _EP + "--moe-expert-capacity-factor 1.0", [0, 3], 1.25),
    "groups, bias": (
        4,
        _EP + "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-score-function "
        "sigmoid --moe-router-enable-expert-bias",
        [0],
    ),
    "overlap": (4, _EP + _SHARED + _OVERLAP, [3]),
    "async": (4, _EP + "--moe-permutation-async-comm", [0]),
    "zero memory 1": (4, _EP + _OVERLAP + "--moe-zero-memory level1", [0]),
    "adaptive": (4, _EP + "--moe-adaptive-recompute-activation", [0]),
    "eight bits, recomputed": (
        4,
        _EP + _OVERLAP + "--hidden-size 128 --moe-fp8-dispatch both --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 "
        "--optimize-recomp-communication-level 1",
        [0],
    ),
    "sizes on the device": (4, _EP + _OVERLAP + "--moe-device-bound 1.25", [0]),
    "both passes at once": (4, _EP + _PP + _VIRTUAL + "--moe-fb-overlap", [0]),
    "context": (
        4,
        _EP + _TP + "--context-parallel-size 2 --use-flash-attn --global-batch-size 4",
        [3],
    ),
    "once to each node": (4, _EP4 + _OVERLAP + "--moe-alltoall-exchange hierarchical", [3], 1.0, 2),
    "hot experts": (4, _EP + _OVERLAP + "--balanced-moe-experts", [0]),
    "windows": (4, _EP + _DEEPSPEED + "--moe-no-drop --moe-dynamic-padding", [3]),
    "pipe experts": (4, _EP + _DEEPSPEED + "--use-pipe-experts", [0]),
    "behind attention": (4, _EP + _DEEPSPEED + "--ampipe-degree 2", [0]),
    "adapters": (
        4,
        _EP + "--dry-run --lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 "
        "experts.linear_fc2",
        [0],
    ),
}


@pytest.mark.weekly_cases(
    "alltoall",
    "context",
    "sliced",
    "async",
    "overlap",
    "zero memory 1",
    "once to each node",
    "behind attention",
    "adapters",
    "spread over*",
    "groups, bias",
    "adaptive",
    "pipe experts",
    "windows",
    "dropped, unbalanced",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fake_equals_real(ranks, case: str) -> None:
    assert compare(ranks, *CASES[case]) == {}
