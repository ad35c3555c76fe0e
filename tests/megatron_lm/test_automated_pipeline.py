"""``--automated-pipeline`` with an unmodified ``pretrain_gpt.py``: measured, then used."""

from __future__ import annotations

import json

import pytest

from tests.megatron_lm.launch import pretrain
from tests.megatron_lm.test_matrix import MODEL, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]


def test_the_next_start_uses_what_the_first_has_measured(tmp_path):
    flags = f"{MODEL} {TRAINING} --num-layers 6 --train-iters 6 --pipeline-model-parallel-size 2 "
    flags += f"--automated-pipeline-file {tmp_path}/p.json --automated-pipeline "
    flags += "--save-memory-ratio 0.05"
    first = pretrain(tmp_path, 2, *flags.split())
    assert "automated pipeline: measured" in first.output
    result = json.loads((tmp_path / "p.json").read_text())
    assert sum(map(sum, result["layers"])) == 6 and any(result["recompute"])
    layers = ",".join(str(count) for (count,) in result["layers"])
    second = pretrain(tmp_path, 2, *flags.split())
    assert f"num_layer_list .................................. {layers}" in second.output
    assert second.losses
