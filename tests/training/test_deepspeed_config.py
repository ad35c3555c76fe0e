"""``--deepspeed_config``: DeepSpeed's file means the trainer's own flags."""

from __future__ import annotations

import json

import pytest

from tests.support.trainer_job import SETUP, TINY
from tests.training.command_line import parse_all

BATCH = TINY.index("--global-batch-size")
FLAGS = [*TINY[:BATCH], *TINY[BATCH + 2 :], "--deepspeed"]
ZERO_2 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 3},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


@pytest.fixture(scope="module")
def results(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    files = {
        "zero 2": json.dumps(ZERO_2),
        "contradiction": json.dumps({"train_micro_batch_size_per_gpu": 4}),
        "no json": '{"fp16":\n {"enabled": true,}}',
        "a stage": json.dumps({"zero_optimization": {"stage": 7}}),
        "unknown": json.dumps({"train_micro_batch": 2, "fp16": {"enable": True}}),
        "optimizer": json.dumps({"optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 1}}),
        "kind": json.dumps({"fp16": {"enabled": "yes"}, "gradient_clipping": [1], "bf16": True}),
        "twice": '{"train_batch_size": 6, "train_batch_size": 12}',
        "tuning": json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": True}}),
    }
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    cases = [([*FLAGS, "--deepspeed_config", str(folder / f"{name}.json")],) for name in files]
    (answers,) = rank_pool.run(1, parse_all, cases, setup=SETUP, backend=None, timeout=240)
    return dict(zip(files, answers, strict=True))


def test_the_settings_are_the_trainers_flags(results):
    assert results["zero 2"]["error"] is None
    values = results["zero 2"]["values"]
    assert (values["micro_batch_size"], values["global_batch_size"]) == (2, 6)
    assert (values["fp16"], values["bf16"], values["clip_grad"]) == (True, False, 0.5)
    assert (values["loss_scale"], values["initial_loss_scale"]) == (None, 256)
    assert (values["hysteresis"], values["use_distributed_optimizer"]) == (3, True)
    assert {"micro_batch_size", "fp16", "clip_grad"} <= set(values["given_flags"])
    assert values["ignored_flags"][0] == "--deepspeed"
    assert values["ignored_flags"][1].startswith("ZeRO stage 2 (in fp16 stage 1 is used; ")


def test_errors_name_the_key_and_its_location(results):
    contradiction = "--micro-batch-size 2 contradicts train_micro_batch_size_per_gpu 4 of "
    assert contradiction in results["contradiction"]["error"]
    assert "no json.json is no valid JSON, line 2: " in results["no json"]["error"]
    assert "zero_optimization.stage 7 must be from 0 to 3" in results["a stage"]["error"]


def test_unsupported_keys_are_refused(results):
    assert "train_micro_batch is not known here; did you mean" in results["unknown"]["error"]
    assert "fp16.enable is not known here; did you mean fp16.en" in results["unknown"]["error"]
    assert "optimizer has no effect here: set --optimizer" in results["optimizer"]["error"]
    assert "'train_batch_size' is given twice" in results["twice"]["error"]
    for problem in (
        "fp16.enabled must be true or false, not 'yes'",
        "gradient_clipping must be a number, not [1]",
        "bf16 must be an object",
    ):
        assert problem in results["kind"]["error"]
    assert results["tuning"]["error"] is None
