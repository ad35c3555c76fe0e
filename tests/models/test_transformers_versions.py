"""A config.json means the same with classes of transformers 4 and 5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.lazy import Lazy, needs

needs("transformers")

from mindspeed.errors import ConfigError
from mindspeed.models import transformers_versions as versions
from mindspeed.models.families import FAMILIES

transformers = Lazy("transformers")

OLDER = SimpleNamespace(rope_theta=10000.0, max_position_embeddings=2048)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {}},
        {"rope_parameters": LLAMA3},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}},
    ],
    ids=str,
)
def test_rotary_settings_are_gathered_as_by_a_class_of_transformers_5(given):
    if not versions.at_least("5"):
        pytest.skip("it is the class of transformers 5 that is compared with")
    expected = dict(transformers.LlamaConfig(**given).rope_parameters)
    found = versions.rope_parameters(given, OLDER)
    assert {**expected, "type": None} == {**found, "type": None}


def test_settings_of_each_layer_are_refused():
    given = {"rope_parameters": {"full_attention": {"rope_theta": 500.0}}}
    with pytest.raises(ConfigError, match="settings of their own for full_attention"):
        versions.rope_parameters(given, OLDER)


def test_an_older_class_is_given_the_names_that_it_knows():
    file = {"hidden_size": 8, "num_experts": 4, "rope_theta": 5e5, "rope_parameters": LLAMA3}
    given = versions.for_older_class("mixtral", file)
    assert given == {"hidden_size": 8, "num_local_experts": 4, "rope_theta": 5e5}
    assert "num_experts" in versions.for_older_class("qwen3_moe", file)
    assert versions.for_older_class("deepseek_v3", {"num_local_experts": None}) == {}


def test_the_oldest_release_is_that_of_the_package():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    suite = tomllib.loads(text)["project"]["optional-dependencies"]["suite"]
    assert f"transformers>={versions.OLDEST}" in suite


def test_a_release_without_a_family_is_named_with_what_to_install(monkeypatch):
    absent = replace(FAMILIES["llama"], config_path="no_such.LlamaConfig")
    for installed, fix in (
        ("4.57.6", "transformers is 4.57.6: install transformers 5"),
        ("5.1", "install a newer transformers"),
    ):
        monkeypatch.setattr(versions, "version", lambda name, installed=installed: installed)
        with pytest.raises(ConfigError, match=f"of llama is read with transformers: {fix} "):
            _ = absent.config_class
        with pytest.raises(ConfigError, match=f"one set for all layers; {fix}"):
            versions.rope_parameters({"rope_parameters": {"full_attention": {"a": 1}}}, OLDER)
