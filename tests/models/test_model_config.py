"""The model that a family table builds is the one that the trainer builds from the same flags."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("megatron.core")

from mindspeed.models.model_config import ModelConfig
from mindspeed.models.presets import presets
from mindspeed.training.arguments import build_parser
from mindspeed.training.recipe import flag_words
from mindspeed.training.resolve import resolve

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
        if field.default is not dataclasses.MISSING and field.name not in derived:
            default = trainers[field.name]
            if field.name == "mask_padded_vocab":  # every family sets it
                assert field.default is True
            else:
                assert (field.default, type(field.default)) == (default, type(default)), field.name


def test_a_flag_that_is_no_value_of_a_model_is_refused():
    flags = next(iter(presets().values())).flags
    with pytest.raises(TypeError, match="lr"):
        ModelConfig.from_flags({**flags, "lr": 1e-4})
