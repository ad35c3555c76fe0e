"""Plans as data and as files, layers that flags count, and combinations that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.journal import Journal
from mindspeed.memory.layer_rules import ChunkLayers, largest, plan_for, rules_of
from mindspeed.memory.plan import ChunkPlan, SiteAction
from tests.support.lazy import needs

SITES = st.sampled_from(["layer", "mlp", "self_attention", "mlp.activation"])
PLANS = st.dictionaries(
    st.from_regex(r"decoder\.layers\.[0-9]", fullmatch=True),
    st.dictionaries(SITES, st.sampled_from(SiteAction), max_size=3),
    max_size=4,
).map(ChunkPlan)


@pytest.mark.slow
@given(PLANS)
def test_a_plan_is_what_its_json_says(plan):
    again = ChunkPlan.from_json(plan.to_json())
    assert list(again.actions()) == sorted(plan.actions())
    assert again.digest() == plan.digest()
    shuffled = ChunkPlan(dict(reversed(list(plan.layers.items()))))
    assert shuffled.digest() == plan.digest()


@given(PLANS, PLANS)
def test_joined_plans_have_the_actions_of_both(one, other):
    joined = dict(((layer, site), action) for layer, site, action in one.joined(other).actions())
    for layer, site, _ in one.actions():
        assert (layer, site) in joined
    for layer, site, action in other.actions():
        assert joined[layer, site] is action


def test_different_plans_have_different_digests():
    plans = [ChunkPlan({"a": {"mlp": action}}) for action in SiteAction] + [
        ChunkPlan(),
        ChunkPlan({"b": {}}),
    ]
    digests = [plan.digest() for plan in plans]
    assert len(set(digests)) == len(SiteAction) + 1 and digests[-1] == digests[-2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "no JSON"),
        ("[]", "an object of layer: sites is needed"),
        ('{"a": 3}', "a: an object of site: action is needed, not 3"),
        ('{"a": {"mlp": "drop"}}', "a, mlp: 'drop' is none of keep, recompute"),
    ],
)
def test_json_that_is_no_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ChunkPlan.from_json(text)


def test_later_rules_win_and_layers_are_those_of_the_model():
    rules = rules_of(
        {
            "all": {"mlp": "recompute", "input_layernorm": "recompute_output"},
            "2-3,7": {"mlp": "keep"},
            "mtp": {"layer": "offload"},
        }
    )
    assert largest(rules) == 7
    plan = plan_for(rules, {"decoder.layers.0": 1, "decoder.layers.1": 2, "mtp.layers.0": None})
    norm = {"input_layernorm": SiteAction.RECOMPUTE_OUTPUT}
    assert plan.layers == {
        "decoder.layers.0": {"mlp": SiteAction.RECOMPUTE, **norm},
        "decoder.layers.1": {"mlp": SiteAction.KEEP, **norm},
        "mtp.layers.0": {"mlp": SiteAction.RECOMPUTE, **norm, "layer": SiteAction.OFFLOAD},
    }
    assert plan_for(rules_of({"3": {"mlp": "keep"}}), {"a": 0, "b": None}) == ChunkPlan()


@pytest.mark.parametrize("selector", ["", "first", "3-", "-3", "5-3", "1,,2", "1-2-3", "0-9999999"])
def test_selectors_that_are_no_layers_are_refused(selector):
    with pytest.raises(ValueError, match="layers"):
        rules_of({selector: {"mlp": "keep"}})


@pytest.mark.parametrize("value", [None, [], {}, "all", {"all": ["mlp"]}, {"all": {"mlp": "drop"}}])
def test_files_that_are_no_plan_are_refused(value):
    with pytest.raises(ValueError, match=r"needed|none of"):
        rules_of(value)


def chunk(first, count, index=0, chunks=1, mtp=()):
    numbers = {f"decoder.layers.{i}": first + i for i in range(count)}
    decoder = {path: i for i, path in enumerate(numbers)}
    return ChunkLayers(decoder, numbers | dict.fromkeys(mtp), mtp, index, chunks)


def test_layers_of_a_rank_are_those_of_the_example():
    """8 layers, 2 stages of 2 chunks, N = 3."""
    found = {}
    for rank in range(2):
        found[rank] = [
            layers.numbers[path]
            for index in range(2)
            for layers in [chunk(4 * index + 2 * rank, 2, index, 2)]
            for path in layers.first(3, of_rank=True)
        ]
    assert found == {0: [0, 1, 4], 1: [2, 3, 6]}


def test_layers_after_those_recomputed_as_a_whole():
    layers = chunk(0, 5, mtp=("mtp.layers.0",))
    assert layers.first(2, after=1) == ("decoder.layers.1", "decoder.layers.2")
    assert layers.first(None, after=3) == ("decoder.layers.3", "decoder.layers.4", "mtp.layers.0")
    assert layers.first(9, after=5) == ()


NORM, ACTIVATION = {"recompute_norm": True}, {"recompute_activation_function": True}
PER_RANK = {"enable_recompute_layers_per_pp_rank": True}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
REFUSED = [
    (NORM | UNIFORM, "--recompute-norm: .*--recompute-method uniform"),
    (ACTIVATION | UNIFORM, "--recompute-activation-function: .*--recompute-method uniform"),
    ({"recompute_norm_num_layers": 2}, "--recompute-norm-num-layers: .*without --recompute-norm"),
    (
        {"recompute_activation_function_num_layers": 2},
        "--recompute-activation-function-num-layers: .*without --recompute-activation-function",
    ),
    (NORM | {"recompute_norm_num_layers": 9, "num_layers": 8}, "9 of 8 layers"),
    (
        NORM | {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "--recompute-norm: --recompute-modules layernorm",
    ),
    (
        ACTIVATION | {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        "--recompute-activation-function: --recompute-modules mlp",
    ),
    (NORM | {"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "--cpu-offloading"),
    (
        NORM | {"fine_grained_activation_offloading": True},
        "--recompute-norm: .*--fine-grained-activation-offloading",
    ),
    (NORM | {"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    (ACTIVATION | {"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap"),
    (PER_RANK, "--enable-recompute-layers-per-pp-rank: .*--recompute-method block"),
    (PER_RANK | BLOCK, "--enable-recompute-layers-per-pp-rank: .*virtual pipeline"),
    (
        PER_RANK | BLOCK | {"virtual_pipeline_model_parallel_size": 2, "fp8": "hybrid"},
        "--enable-recompute-layers-per-pp-rank: cannot be combined with --fp8-format",
    ),
    (NORM | {"optimization_level": 1}, "--recompute-norm: needs --optimization-level >= 2"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_combinations_are_refused_with_both_flags(values, message):
    with pytest.raises(ConfigError, match=message):
        registry.resolve(values, "cpu")


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("all: {mlp: drop}", {}, "layers all, mlp: 'drop' is none of keep"),
        ("7: {mlp: keep}", {"num_layers": 4}, "there is no layer 7: .*--num-layers is 4"),
        ("all: {mlp: keep}", BLOCK, "--recompute-granularity full"),
        ("all: {mlp: keep}", {"fp8": "hybrid"}, "--fp8-format"),
        ("{", {}, "--activation-plan"),
    ],
)
def test_plan_files_are_refused_with_their_name(tmp_path, text, more, message):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        registry.resolve({"activation_plan": str(file), **more}, "cpu")


def test_a_missing_plan_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--activation-plan .*missing\.yaml"):
        registry.resolve({"activation_plan": str(tmp_path / "missing.yaml")}, "cpu")


def test_names_that_do_not_exist_are_refused_with_the_nearest():
    needs("megatron.core")
    from mindspeed.memory.megatron import check_names, install

    known = {"decoder.layers.0": {"layer": 0, "self_attention": 0, "self_attention.linear_qkv": 0}}
    with pytest.raises(ValueError, match="no site 'attention'; there are self_attention"):
        check_names(ChunkPlan({"decoder.layers.0": {"attention": SiteAction.KEEP}}), known)
    with pytest.raises(
        ValueError, match=r"no layer 'decoder.layers.1'; there are decoder.layers.0"
    ):
        check_names(ChunkPlan({"decoder.layers.1": {"layer": SiteAction.KEEP}}), known)
    with pytest.raises(ValueError, match="use recompute"):
        check_names(ChunkPlan({"decoder.layers.0": {"layer": SiteAction.RECOMPUTE_OUTPUT}}), known)
    with pytest.raises(ValueError, match="no layer"):
        install(torch.nn.Identity(), ChunkPlan({"layers.0": {"mlp": SiteAction.KEEP}}), Journal())


def test_two_flags_with_different_actions_for_a_site_are_named(ranks):
    needs("megatron.core")
    from tests.memory import memory_ranks

    (message,) = ranks(1, memory_ranks.conflict, setup="tests.support.warm")
    assert "decoder.layers.0, mlp: recompute by --second, but offload by --first" in message


def test_json_is_yaml(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"all": {"layer": "recompute"}, "0": {"layer": "keep"}}))
    configuration = registry.resolve({"activation_plan": str(file), "num_layers": 1}, "cpu")
    assert "activation-plan" in [feature.name for feature in configuration.enabled]


def test_a_plan_that_differs_between_ranks_is_refused_on_all(ranks):
    needs("megatron.core")
    from tests.memory import memory_ranks

    for message in ranks(2, memory_ranks.disagreement, setup="tests.support.warm"):
        assert "the plan of --activation-plan of ranks 1 differs from that of rank 0" in message
