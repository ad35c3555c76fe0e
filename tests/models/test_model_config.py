"""The model that a family table builds is the one that the trainer builds from the same flags."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed.models.model_config import ModelConfig
from mindspeed.models.presets import presets
from mindspeed.training.arguments import build_parser
from mindspeed.training.recipe import flag_words

resolve = Lazy("mindspeed.training.resolve", "resolve")


RUN = ["--lr=1", "--train-iters=1", "--mock-data", "--tokenizer-type=NullTokenizer"]


@pytest.fixture(scope="module")
def parser():
    return build_parser()


@pytest.mark.parametrize("name", presets())
def test_every_value_equals_the_trainers(parser, name):
    flags = presets()[name].flags
    mtp = 1 if presets()[name].family == "deepseek_v3" else None
    words = [*flag_words(flags, parser), f"--seq-length={flags['max_position_embeddings']}", *RUN]
    words += [f"--mtp-num-layers={mtp}"] if mtp else []
    trainers = vars(resolve(parser.parse_args(words), 1).args)
    ours = vars(ModelConfig.from_flags(flags, mtp_num_layers=mtp).namespace())
    trainers["padded_vocab_size"] = trainers["vocab_size"]  # no tensor-parallel ranks: no padding
    assert {name: (value, type(value)) for name, value in ours.items()} == {
        name: (trainers[name], type(trainers[name])) for name in ours
    }


def test_defaults_are_the_trainers(parser):
    trainers = vars(parser.parse_args([]))
    derived = {"params_dtype", "num_query_groups", "add_position_embedding", "tokenizer_type"}
    for field in dataclasses.fields(ModelConfig):
        if field.name not in derived and field.default is not dataclasses.MISSING:
            default = trainers[field.name]
            if field.name == "mask_padded_vocab":  # every family sets it
                assert field.default is True
            else:
                assert (field.default, type(field.default)) == (default, type(default)), field.name


def test_a_family_of_another_package_may_set_other_flags_and_must_set_the_sizes():
    flags = next(iter(presets().values())).flags
    model = ModelConfig.from_flags({**flags, "softmax_type": "learnable"})
    assert model.namespace().softmax_type == "learnable"
    with pytest.raises(TypeError, match="hidden_size"):
        ModelConfig.from_flags({k: v for k, v in flags.items() if k != "hidden_size"})
