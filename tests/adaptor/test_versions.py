"""What differs between releases of Megatron; the installed one has what later releases brought."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from packaging.version import Version

from mindspeed.adaptor.repairs.data import dataset_tokens
from mindspeed.adaptor.versions import TESTED, fields, is_tested
from mindspeed.adaptor.versions.trainer import known_options, learning_rate
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature
from mindspeed.features.registry import resolve
from mindspeed.flags import flag
from mindspeed.training import arguments

OLD = Version("0.15.3")


def test_a_later_patch_of_a_tested_release_is_accepted():
    for release in map(Version, TESTED):
        later = Version(f"{release.major}.{release.minor}.{release.micro + 1}")
        assert is_tested(release)
        assert is_tested(later)
    assert not is_tested(Version("0.14.0"))


def test_later_fields_are_those_of_the_installed_release():
    installed = {
        arguments.namespace_name(field.name): arguments.DEFAULT.get(field.name, field.default)
        for _, config in arguments._megatron_sections()
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }
    later = {field.name: field.default for field in fields.later_fields(OLD)}
    assert later["qk_clip"] is False
    del later["offload_modules"]  # has a factory
    assert later == {name: installed[name] for name in later}
    assert not list(fields.later_fields(Version("0.16.1")))


def test_a_flag_of_a_later_release_is_refused_unless_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(arguments, "megatron_version", lambda: OLD)
    monkeypatch.setattr(arguments, "_megatron_sections", tuple)
    parser = arguments.build_parser()
    given = arguments.parse(["--no-qk-clip", "--muon-split-qkv"], parser)
    assert (given.qk_clip, given.muon_momentum) == (False, 0.9)
    for words in ("--qk-clip", "--no-muon-split-qkv", "--linear-attention-freq 2"):
        needed = f"{words.split()[0]} is not in megatron-core 0.15.3: install megatron-core 0.16.1"
        with pytest.raises(ConfigError, match=needed):
            arguments.parse(words.split(), parser)


class Later(Feature, level=2, megatron_versions=">=99"):
    """A feature of a later release."""

    later: bool = flag(False, "on")


def test_a_feature_of_another_release_is_refused_by_its_flag():
    resolve({}, "cpu", [Later])
    with pytest.raises(ConfigError, match=r"--later: does not run with megatron-core 0\.16\.1"):
        resolve({"later": True}, "cpu", [Later])


def test_an_option_that_is_not_set_is_not_passed():
    def function(known=False):
        pass

    assert known_options(function, known=True, later_one=False) == {"known": True}
    with pytest.raises(ConfigError, match="--later-one is not in megatron-core"):
        known_options(function, later_one=True)


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"default_config": True}, {"default_config": False}),
        ({"is_decoupled_lr": False}, {"is_decoupled_lr": True}),  # before 0.16
    ],
)
def test_the_logged_learning_rate_is_that_of_most_parameters(own, others):
    groups = [{**others, "lr": 2.0}, {**own, "lr": 1.0}]
    assert learning_rate(groups) == 1.0
    assert learning_rate(groups[:1]) is None


def test_the_end_of_a_document_is_no_padding_and_mock_tokens_have_an_embedding():
    def build(self, config):
        self.config, self._pad_token_id = config, config.tokenizer.pad

    for pad, expected in ((7, -1), (3, 3)):
        dataset = SimpleNamespace()
        tokenizer = SimpleNamespace(eod=7, pad=pad, vocab_size=10)
        dataset_tokens.keep_ends(build)(dataset, SimpleNamespace(tokenizer=tokenizer))
        assert dataset._pad_token_id == expected
    mock = SimpleNamespace(tokenizer=tokenizer)
    assert dataset_tokens.stay_in_vocabulary(lambda self, index: index + 8)(mock, 5) == 3
