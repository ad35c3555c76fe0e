"""A job measures itself, and its next start takes the result: the same model, less memory."""

from __future__ import annotations

import json

import pytest

from mindspeed.pipeline.automated.profile import read_profile
from mindspeed.pipeline.automated.result import read_result
from mindspeed.pipeline.automated.stages import StageChoice, price_of
from mindspeed.pipeline.layout import evenly
from tests.pipeline.automated.automated_job import peak_bytes
from tests.support.trainer_job import SETUP
from tests.training.matrix_job import train

MODEL = (
    "--group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights "
    "--num-layers 6 --pipeline-model-parallel-size 2 --train-iters 6 --micro-batch-size 1"
)
RATIO = ["--save-memory-ratio", "0.05"]
OPTIONS = {"setup": SETUP, "backend": None, "timeout": 240}


@pytest.mark.weekly_cases("local")
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_a_start_measures_and_the_next_one_uses_the_result(spec, ranks, tmp_path):
    plan, file = tmp_path / "plan.json", tmp_path / "metrics.jsonl"
    words = [*MODEL.split(), "--transformer-impl", spec]

    def losses(*flags: str) -> list[float]:
        file.unlink(missing_ok=True)
        ranks(2, train, [*words, "--metrics-file", str(file), *flags], **OPTIONS)
        records = [json.loads(line) for line in file.read_text().splitlines()]
        return [record["lm_loss"] for record in records if "lm_loss" in record]

    automated = ["--automated-pipeline", "--automated-pipeline-file", str(plan), *RATIO]
    assert losses(*automated) == losses(), "measuring changes nothing"
    profile, result = read_profile(tmp_path / "plan.profile.json"), read_result(plan)
    assert len(profile.layers) == 6 and profile.ranks == 2 and profile.latency > 0
    assert sum(map(sum, result.layers)) == 6 and any(result.recompute)
    assert losses(*automated) == losses(*result.flags())

    found = ranks(2, peak_bytes, [*words, *result.flags()], **OPTIONS)
    choice = StageChoice(result.layers, result.recompute, result.module, result.schedule)
    assert found == pytest.approx(price_of(profile, choice).activations, rel=0.05)
    default = StageChoice(evenly(6, 2), (0, 0))
    before = ranks(2, peak_bytes, words, **OPTIONS)
    assert before == pytest.approx(price_of(profile, default).activations, rel=0.05)
