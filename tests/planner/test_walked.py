"""Spliced bytes are those of real ranks, which a walk of their objects finds."""

from __future__ import annotations

import pytest

from tests.planner import walked
from tests.planner.real_and_fake import SETUP

CASES = {
    "1F1B": "--num-layers 20 --pipeline-model-parallel-size 4 --bf16 --global-batch-size 24",
    "interleaved": "--num-layers 16 --pipeline-model-parallel-size 4 --global-batch-size 16 "
    "--num-layers-per-virtual-pipeline-stage 2",
    "recomputed, tensor parallel": "--num-layers 10 --pipeline-model-parallel-size 2 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 12 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
"""Jobs of four ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_after_each_action_are_those_of_a_walk(ranks, name):
    flags = CASES[name]
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    stages = 2 if "tensor" in name else 4
    (expected,) = ranks(1, walked.planned, flags, 4, list(range(stages)), **options)
    found = ranks(4, walked.levels, flags, env={"LOCAL_WORLD_SIZE": "4"}, **options)
    for stage, one in enumerate(expected):
        real = found[stage * 4 // stages]
        assert len(real) == len(one)
        far = {i: a - b for i, (a, b) in enumerate(zip(real, one, strict=True)) if a != b}
        assert not far, f"stage {stage}"
