"""A model alone becomes a job: what is assumed, and that every job can start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed.errors import ConfigError
from mindspeed.models.families import families
from mindspeed.models.presets import presets

question = Lazy("mindspeed.planner.question")

ONE_OF_A_FAMILY = tuple({preset.family: name for name, preset in presets().items()}.values())


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_A_FAMILY[::9], id="some"),
        pytest.param(ONE_OF_A_FAMILY, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_assumed_flags_start_every_family(ranks, names) -> None:
    from tests.planner.question_job import start

    [tried] = ranks(1, start, names, 16, setup="tests.support.warm", backend=None)
    assert len(tried) == 3 * len(names)
    assert {line.split(maxsplit=1)[1] for line in tried} == {
        "pretrain False",
        "finetune False",
        "lora True",
    }


def test_every_family_of_the_presets_is_tried() -> None:
    assert len(ONE_OF_A_FAMILY) > 20 and len(families()) >= len(ONE_OF_A_FAMILY)


def test_the_batch_is_of_tokens_or_samples_and_a_multiple_of_the_devices() -> None:
    pretrain, lora = question.PURPOSES["pretrain"], question.PURPOSES["lora"]
    assert [pretrain.batch(4096, devices) for devices in (1, 16, 24, 2048)] == [
        1024,
        1024,
        1032,
        2048,
    ]
    assert pretrain.batch(8192, 16) == 512
    assert [lora.batch(4096, devices) for devices in (1, 12, 64)] == [16, 24, 64]


def test_what_the_user_says_is_not_assumed() -> None:
    model, flags = question.named_model("qwen3-8b")
    said = ["--seq-length", "8192", "--fp16", "--no-overlap-param-gather"]
    said += ["--global-batch-size", "32"]
    assumed, words = question.job_words(question.PURPOSES["pretrain"], model, flags, said, 16)
    assert words[-len(said) :] == said
    for flag in ("--bf16", "--seq-length", "--overlap-param-gather", "--global-batch-size"):
        assert not any(word.startswith(flag) for word in assumed), flag
    assumed, _ = question.job_words(
        question.PURPOSES["pretrain"], model, flags, ["--seq-length", "8192"], 16
    )
    assert "--global-batch-size=512" in assumed


def test_a_folder_is_a_model(tmp_path: Path, tiny_config: Path) -> None:
    for text in (str(tiny_config), f"hf:{tiny_config}"):
        name, flags = question.named_model(text)
        assert name == str(tiny_config) and flags["num_layers"] == 2
    purpose = question.PURPOSES["lora"]
    words = purpose.to_type(name, ["--model", name, "--bf16"])
    assert words == ["--load", f"hf:{name}", "--bf16", "--data", "FILE.jsonl"]
    words = purpose.to_type("qwen3-8b", ["--model", "qwen3-8b"])
    assert words[:2] == ["--load", "hf:FOLDER"]


@pytest.fixture
def tiny_config(tmp_path: Path) -> Path:
    config = {**presets()["qwen3-0.6b"].config, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_wrong_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qwen3-8: there is no such preset .* closest: qwen3-8b"):
        question.named_model("qwen3-8")
    with pytest.raises(ConfigError, match="hf:away: there is no such folder"):
        question.named_model("hf:away")
    with pytest.raises(ConfigError, match="a script and its flags stand behind --"):
        question.named_model("pretrain_gpt.py")
    (tmp_path / "config.json").write_text('{"model_type": "mamba9"}')
    with pytest.raises(ConfigError, match=r"model_type 'mamba9' is not supported.*supported are"):
        question.named_model(str(tmp_path))
    model, flags = question.named_model("qwen3-8b")
    with pytest.raises(ConfigError, match="--model: the model is qwen3-8b already"):
        question.job_words(question.PURPOSES["lora"], model, flags, ["--model", "llama2-7b"], 8)
