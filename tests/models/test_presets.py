"""Presets and the config reader: published sizes, both directions, messages for the user."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.lazy import Lazy, needs, needs_transformers

needs("megatron.core")

from mindspeed.checkpoint.architecture import ARCHITECTURE, DETAILS
from mindspeed.errors import ConfigError
from mindspeed.models.families import FAMILIES, family_of_args, family_of_config
from mindspeed.models.presets import FILE, model_flags, presets
from mindspeed.models.shape import shape_of
from mindspeed.models.table import parameters
from mindspeed.parsing import parse_yaml
from mindspeed.training.arguments import build_parser
from mindspeed.training.recipe import dump, flag_words, parse_with_recipe

resolve = Lazy("mindspeed.training.resolve", "resolve")


# Billions of parameters as the models' own cards and papers give them.
PUBLISHED = {
    "llama-7b": 6.738,
    "llama-65b": 65.286,
    "llama2-70b": 68.977,
    "llama3.1-8b": 8.030,
    "llama3.2-1b": 1.236,
    "bloom-7b1": 7.069,
    "bloom-176b": 176.247,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-72b": 72.706,
    "qwen3-4b": 4.022,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "mistral-7b-v0.1": 7.242,
    "mixtral-8x7b": 46.703,
    "deepseek-v3": 671.026,
    "deepseek-v2-lite": 15.706,
    "kimi-k2": 1026.408,
    "glm-4.5": 352.798,
    "glm-4.5-air": 106.852,
    "seed-oss-36b": 36.151,
    "qwen1.5-moe-a2.7b": 14.316,
    "qwen2-57b-a14b": 57.409,
    "phi3-mini-4k": 3.821,
    "phi4": 14.660,
    "ernie4.5-0.3b": 0.361,
    "smollm3-3b": 3.075,
    "internlm2-7b": 7.738,
    "internlm2-20b": 19.861,
    "granite-3.3-8b": 8.171,
    "glm4-9b": 9.400,
    "glm4-32b": 32.566,
    "gemma3-270m": 0.268,
    "gemma3-1b": 1.000,
    "olmo2-7b": 7.299,
    "olmo2-32b": 32.234,
    "hunyuan-7b": 7.505,
    "minimax-m2": 228.690,
    "gpt-oss-20b": 20.915,
    "qwen3-next-80b-a3b": 79.674,
    "gpt-oss-120b": 116.829,
    "gemma2-2b": 2.614,
    "gemma2-9b": 9.242,
    "gemma2-27b": 27.227,
    "deepseek-v2": 235.741,
    "llama4-scout": 107.770,
    "llama4-maverick": 400.712,
    "ernie4.5-21b-a3b": 21.825,
    "ernie4.5-300b-a47b": 299.484,
    "hunyuan-a13b": 80.393,
    "granite-3.1-1b-a400m": 1.335,
    "granite-3.1-3b-a800m": 3.299,
}
RUN = ["--lr=1", "--train-iters=1", "--seq-length=64", "--mock-data"]
RUN.append("--tokenizer-type=NullTokenizer")


@pytest.fixture(scope="module")
def parser():
    return build_parser()


def values(parser, *words):
    return resolve(parse_with_recipe([*words, *RUN], parser), 1).args


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(parser, name):
    args = values(parser, "--model", name)
    table = parameters(FAMILIES[presets()[name].family].rules, shape_of(args))
    total = sum(math.prod(parameter.shape) for parameter in table)
    assert round(total / 1e9, 3) == PUBLISHED[name]


OF_TRANSFORMERS_5 = ("gemma3", "minimax-m2")


def test_the_file_of_presets_is_read_as_a_users_file():
    text = FILE.read_text("utf-8")
    strict = parse_yaml(text, FILE.name)
    assert {name: one.config for name, one in presets().items()}.items() <= strict.items()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=needs_transformers("5") if name.startswith(OF_TRANSFORMERS_5) else ()
        )
        for name in presets()
    ],
)
def test_config_json_and_flags_say_the_same(parser, name):
    family = FAMILIES[presets()[name].family]
    flags = presets()[name].flags
    args = parser.parse_args([*flag_words(flags, parser), *RUN])
    resolved = resolve(args, 1).args
    assert family.read(family.write(resolved)) == {
        **flags,
        "max_position_embeddings": max(flags["max_position_embeddings"], 64),
    }
    assert family_of_args(resolved) is family


def test_a_run_takes_every_flag_of_a_family_from_its_checkpoint():
    others = {"vocab_size", "hidden_dropout", "attention_dropout", "init_method_std"}
    others |= {"moe_aux_loss_coeff", "moe_router_load_balancing_type"}  # of a training, not a model
    flags = {name for preset in presets().values() for name in preset.flags}
    assert flags - others <= {*ARCHITECTURE, *DETAILS}


def test_a_model_without_a_name_is_found_by_its_flags(parser):
    def found(name):
        return family_of_args(values(parser, "--model", name, "--model-family=")).name

    own = ("llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "bloom-7b1", "deepseek-v3")
    families = ("llama", "qwen2", "qwen3", "mixtral", "bloom", "deepseek_v3")
    assert tuple(found(name) for name in own) == families
    assert found("mistral-7b-v0.1") == "mistral" and found("baichuan2-13b") == "baichuan"
    assert found("internlm-7b") == "llama"  # the same tensors, and a class of transformers
    with pytest.raises(ConfigError, match="no counterpart"):
        family_of_args(
            values(
                parser,
                "--num-layers=2",
                "--hidden-size=8",
                "--squared-relu",
                "--num-attention-heads=2",
            )
        )


def test_command_line_and_recipe_win_over_the_preset(parser, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model:\n  model: llama2-7b\n  num_layers: 4\n  hidden_size: 256\n")
    words = ["--config", str(recipe), "--hidden-size", "512", *RUN]
    args = parse_with_recipe(words, parser)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size) == (4, 512, 11008)
    again = tmp_path / "again.yaml"
    again.write_text(dump(args, parser))
    same = parse_with_recipe(["--config", str(again)], parser)
    assert dump(same, parser) == dump(args, parser)


def test_messages_name_the_wrong_field():
    with pytest.raises(ConfigError, match="llama2-7b"):
        model_flags("llama2-7")
    with pytest.raises(ConfigError, match="the nearest: qwen3, qwen2"):
        family_of_config({"model_type": "qwen33"})
    llama = dict(presets()["llama3.1-8b"].config)
    intern = {k: v for k, v in presets()["internlm-7b"].config.items() if k != "hidden_size"}
    with pytest.raises(ConfigError, match="no hidden_size"):
        FAMILIES["internlm"].read(intern)
    scaling = {**llama["rope_scaling"], "low_freq_factor": 2.0}
    flags = FAMILIES["llama"].read({**llama, "rope_scaling": scaling})
    assert json.loads(flags["rope_parameters"])["low_freq_factor"] == 2.0
    assert FAMILIES["llama"].read({**llama, "rope_scaling": {**scaling, "low_freq_factor": 1.0}})[
        "use_rope_scaling"
    ]
    with pytest.raises(ConfigError, match='hidden_act is "gelu"; allowed is "silu" or "swish"'):
        FAMILIES["llama"].read({**llama, "hidden_act": "gelu"})


def test_a_family_with_experts_may_have_them_in_no_layer_or_in_every_second(parser):
    """Which ERNIE's file says by three numbers."""
    family = FAMILIES["ernie4_5_moe"]
    plain = presets()["ernie4.5-21b-a3b"].config
    for changes, pattern in (
        ({"moe_layer_start_index": 28}, [0] * 28),
        ({"moe_layer_interval": 2, "moe_layer_end_index": 5}, [0, 1] * 3 + [0] * 22),
        ({"moe_layer_start_index": 0}, 1),
    ):
        flags = family.flags({**plain, **changes})
        assert flags["moe_layer_freq"] == pattern
        args = parser.parse_args([*flag_words(flags, parser), *RUN])
        assert family.flags(family.write(resolve(args, 1).args))["moe_layer_freq"] == pattern


def test_how_many_experts_score_a_group_is_a_flag_where_megatron_counts_others():
    deepseek = presets()["deepseek-v3"].config
    read = FAMILIES["deepseek_v3"].read
    assert "moe_group_score_experts" not in read(deepseek)  # 8 experts of 4 groups: its best 2
    assert read({**deepseek, "topk_group": 8})["moe_group_score_experts"] == 2


def test_an_old_and_a_new_config_json_mean_the_same():
    old = dict(presets()["llama3.1-8b"].config)
    new = {k: v for k, v in old.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": old["rope_theta"], **old["rope_scaling"]}
    assert FAMILIES["llama"].read(new) == FAMILIES["llama"].read(old)
