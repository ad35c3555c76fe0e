"""What differs between releases of Megatron; the installed one has what later releases brought."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from mindspeed.adaptor.repairs.data import dataset_tokens
from mindspeed.adaptor.repairs.experts import router_loss_scale
from mindspeed.adaptor.repairs.parallel import losses
from mindspeed.adaptor.versions import TESTED, checkpoints, fields, is_tested, trainer
from mindspeed.adaptor.versions.defined import with_parameters
from mindspeed.adaptor.versions.tokenizers import NumberTokenizer
from mindspeed.adaptor.versions.trainer import known_options, learning_rate
from mindspeed.errors import ConfigError, TrainingError
from mindspeed.features.feature import Feature
from mindspeed.features.registry import resolve
from mindspeed.flags import flag
from mindspeed.journal import Journal
from mindspeed.training import arguments, megatron_flags

OLD = Version("0.15.3")


def test_a_later_patch_of_a_tested_release_is_accepted():
    for release in map(Version, TESTED):
        later = Version(f"{release.major}.{release.minor}.{release.micro + 1}")
        assert is_tested(release)
        assert is_tested(later)
    assert not is_tested(Version("0.14.0"))


def test_later_fields_are_those_of_the_installed_release():
    installed = {
        arguments.namespace_name(field.name): megatron_flags.DEFAULT.get(field.name, field.default)
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


def test_the_number_of_a_chunk_is_global_state_for_the_time_of_a_call(monkeypatch):
    from megatron.core import parallel_state

    name = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"
    monkeypatch.setattr(parallel_state, name, 0)

    def old(config, *, other=False):
        return config, other, getattr(parallel_state, name)

    function = with_parameters("vp_stage", "pg_collection")(old)
    assert list(inspect.signature(function).parameters)[1:3] == ["vp_stage", "pg_collection"]
    assert function("c", 1) == ("c", False, 1)
    assert function("c", vp_stage=2, other=True) == ("c", True, 2)
    assert function("c") == ("c", False, 0)
    with pytest.raises(ConfigError, match="install megatron-core"):
        function("c", pg_collection=object())


@pytest.mark.parametrize(("per_token", "found"), [(False, 1), (True, 0)])
def test_a_micro_batch_without_tokens_is_divided_by_one_before_0_15(monkeypatch, per_token, found):
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    nothing = torch.tensor(0)
    assert trainer.counted_tokens(nothing, per_token) is nothing
    monkeypatch.setattr(trainer, "at_least", lambda version: False)
    assert trainer.counted_tokens(nothing, per_token) == found


@pytest.mark.parametrize(("per_token", "scale"), [(False, 2.0), (True, 1.0)])
def test_losses_of_routers_are_multiplied_by_the_context_ranks(monkeypatch, per_token, scale):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler as Scaler

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(Scaler, "main_loss_backward_scale", torch.tensor(1.0))
    config = SimpleNamespace(num_moe_experts=4, calculate_per_token_loss=per_token)
    assert router_loss_scale.scale_by_context(lambda config: "output")(config) == "output"
    assert Scaler.main_loss_backward_scale == scale


def test_a_loss_of_two_values_is_refused_per_token_before_0_15():
    config = SimpleNamespace(calculate_per_token_loss=True)
    loss = torch.ones((), requires_grad=True)

    def schedule(forward_step_func, config):
        output, loss_func = forward_step_func()
        return loss_func(output)

    step = losses.check_values(schedule)
    assert len(step(lambda: (loss, lambda x: (x, torch.tensor(1), {})), config)) == 3
    with pytest.raises(TrainingError, match="calculate-per-token-loss"):
        step(lambda: (loss, lambda x: (x, {})), config)


def test_the_common_state_names_known_classes_only_before_0_15(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "at_least", lambda version: False)
    hooks = SimpleNamespace(when_imported=lambda name, then: modules.setdefault(name, then))
    modules, journal = {}, Journal()
    reader = SimpleNamespace(torch=torch)
    checkpoints.install(hooks, journal)
    modules["megatron.core.dist_checkpointing.strategies.common"](reader)
    file = tmp_path / "common.pt"
    torch.save({"args": argparse.Namespace(lr=1.0)}, file)
    assert reader.torch.load(file, weights_only=False)["args"].lr == 1.0
    torch.save({"args": Path.home}, file)
    with pytest.raises(pickle.UnpicklingError):
        reader.torch.load(file, weights_only=False)
    journal.undo()


def test_optimizers_are_stored_as_0_12_and_later_releases_read_them(monkeypatch):
    assert checkpoints.reads("dp_reshardable")
    monkeypatch.setattr(checkpoints, "at_least", lambda version: False)
    kind = "distrib_optim_sharding_type"
    assert kind not in checkpoints.sharding(distributed=False)
    contents = checkpoints.sharding(distributed=True)
    assert checkpoints.reshardable_kinds() == (contents[kind],)
    assert checkpoints.reads(contents[kind])
    assert not checkpoints.reads("dp_reshardable")
    state = {}
    assert checkpoints.save_options(state, contents) == {}
    assert checkpoints.contents_of(state) == contents


def test_words_are_numbers_without_a_tokenizer_of_megatron():
    tokenizer = NumberTokenizer(10)
    assert (tokenizer.eod, tokenizer.vocab_size) == (10, 11)
    assert tokenizer.detokenize(tokenizer.tokenize("3  10")) == "3 10"
