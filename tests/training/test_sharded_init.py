"""ZeRO 2 and 3: no rank holds the whole model while it is built."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.trainer_job import SETUP
from tests.training.sharded_init_job import build

pytest.importorskip("einops")

MODELS = {
    "dense": "",
    "engine": "--transformer-impl transformer_engine",
    "experts": "--transformer-impl transformer_engine --num-experts 4 --moe-router-topk 2 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --expert-model-parallel-size 2",
}


@pytest.mark.weekly_cases("2-experts", "3-engine", "3-dense", "2-dense", "2-engine")
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_weights_are_built_with_less_memory(ranks, stage, model):
    flags = f"--zero-stage {stage} --bf16 {MODELS[model]}"
    given = {"setup": SETUP, "backend": None, "timeout": 240}
    whole, sharded = (ranks(2, build, flags, way, **given) for way in (True, False))
    for before, now in zip(whole, sharded, strict=True):
        np.testing.assert_array_equal(before["shards"], now["shards"])
        assert before["modules"] >= before["weights"]
        assert now["modules"] <= now["kept"] + now["largest"] + 2**14
        assert now["build"] <= now["training"]
