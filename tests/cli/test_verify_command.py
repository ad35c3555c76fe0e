"""``mindspeed verify``: what counts as the same model (the quickstart's test runs the command)."""

from __future__ import annotations

import argparse

import pytest
import torch

from mindspeed.cli import verify
from mindspeed.errors import ConfigError, DataError
from mindspeed.models import transformers_versions
from tests.support.lazy import Lazy, needs

needs("transformers")

transformers = Lazy("transformers")

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]


def tiny_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


class AsMegatron(torch.nn.Module):
    """Another library's model with Megatron's arguments and four padding entries."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, attention_mask):
        assert attention_mask is None
        logits = self.model(input_ids=input_ids, position_ids=position_ids).logits
        return torch.nn.functional.pad(logits, (0, 4), value=1e4)


def test_equal_models_have_equal_logits_apart_from_vocabulary_padding():
    found = verify.compare(AsMegatron(tiny_llama()), tiny_llama(), ROWS)
    assert found.largest < 1e-5
    assert found.agreement == 1.0
    assert found.tokens == 12
    rows = [tiny_llama()(input_ids=torch.tensor([row])).logits[0] for row in ROWS]
    expected = sum(
        float(
            torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
        )
        for logits, row in zip(rows, ROWS, strict=True)
    )
    assert found.losses == pytest.approx((expected / 10, expected / 10), abs=1e-5)


def test_a_changed_weight_is_found():
    other = tiny_llama()
    with torch.no_grad():
        other.lm_head.weight[7] += 0.5
    found = verify.compare(AsMegatron(tiny_llama()), other, ROWS)
    hidden = tiny_llama().model(input_ids=torch.tensor([ROWS[0]])).last_hidden_state
    others = tiny_llama().model(input_ids=torch.tensor([ROWS[1]])).last_hidden_state
    expected = max(float(0.5 * h.sum(-1).abs().max()) for h in (hidden, others))
    assert found.largest == pytest.approx(expected, rel=1e-4)
    assert found.losses[0] != found.losses[1]


def run(*words):
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    return verify.run(parser.parse_args([str(word) for word in words]))


def test_missing_inputs_are_reported_before_a_model_is_loaded(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--hf .*not a Hugging Face model, it has no config\.json"
    ):
        run("--load", "x", "--hf", tmp_path, "--input", "y")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"--input .*there is no such file"):
        run("--load", "x", "--hf", tmp_path, "--input", tmp_path / "no")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"lines of \{'text': ...\} are expected"):
        run("--load", "x", "--hf", tmp_path, "--input", tmp_path / "a.jsonl")


def test_a_file_that_older_transformers_would_read_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(transformers_versions, "version", lambda name: "4.57.6")
    transformers_versions.check_spelling({"rope_theta": 5e5}, "--hf x")
    with pytest.raises(ConfigError, match=r"^--hf x: transformers 4.57.6 .*: install transformers"):
        transformers_versions.check_spelling({"rope_parameters": {"rope_theta": 5e5}}, "--hf x")
    monkeypatch.setattr(transformers_versions, "version", lambda name: "5.0.0")
    transformers_versions.check_spelling({"rope_parameters": {"rope_theta": 5e5}}, "--hf x")
