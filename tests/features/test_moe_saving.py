"""``--moe-zero-memory`` and ``--moe-adaptive-recompute-activation``: what is refused."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.experts.moe_adaptive_recompute import MoeAdaptiveRecompute as ADAPTIVE
from mindspeed.features.experts.moe_zero_memory import MoeZeroMemory as ZERO
from mindspeed.features.feature import Problem
from tests.features.test_expert_flags import JOB, TP

MEGATRON = {"num_experts": 8, "num_layers": 8, "moe_token_dispatcher_type": "alltoall"}


def problems(feature, flags, megatron) -> list[Problem]:
    chosen = feature(**flags)
    assert chosen.enabled(MEGATRON)
    return list(chosen.problems(MEGATRON | megatron))


ZERO_ERRORS = [
    ({"moe_zero_memory_num_layers": 1}, {}, "has no effect with --moe-zero-memory disable"),
    (
        {"moe_zero_memory": "level0", "moe_zero_memory_num_layers": 1},
        {},
        "has no effect with --moe-zero-memory level0",
    ),
    (
        {"moe_zero_memory": "level1", "moe_zero_memory_num_layers": 5},
        {"pipeline_model_parallel_size": 2},
        "give 0 to 4",
    ),
    (
        {"moe_zero_memory": "level1"},
        {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
        "redundant",
    ),
    ({"moe_zero_memory": "level0"}, {"moe_apply_probs_on_input": True}, "level1"),
]
ADAPTIVE_ERRORS = [
    ({"moe_adaptive_recompute_activation_scale": 1.5}, {}, "has no effect without"),
    (
        {"moe_adaptive_recompute_activation": True},
        {"moe_zero_memory": "level1"},
        "has no effect with --moe-zero-memory level1",
    ),
]
COMMON = [
    ({"num_experts": None}, "add --num-experts"),
    ({"moe_token_dispatcher_type": "flex"}, "is for the dispatcher alltoall or allgather"),
    ({"recompute_granularity": "full"}, "has no effect with --recompute-granularity full"),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "redundant"),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "redundant"),
    ({"swap_attention": True, "recompute_num_layers": 2}, "--swap-attention"),
    ({"cuda_graph_impl": "local"}, "CUDA graph"),
    (
        {"fine_grained_activation_offloading": True, "offload_modules": ["expert_fc1"]},
        "--offload-modules expert_fc1",
    ),
]


@pytest.mark.parametrize(
    ("feature", "flags", "megatron", "said"),
    [
        *((ZERO, *case) for case in ZERO_ERRORS),
        *((ADAPTIVE, *case) for case in ADAPTIVE_ERRORS),
        *((ZERO, {"moe_zero_memory": "level0"}, *case) for case in COMMON),
        *((ADAPTIVE, {"moe_adaptive_recompute_activation": True}, *case) for case in COMMON),
    ],
)
def test_misuse_is_refused_with_one_message(feature, flags, megatron, said):
    (problem,) = problems(feature, flags, megatron)
    assert said in str(problem)


@pytest.mark.parametrize(
    "megatron",
    [
        {},
        {"moe_token_dispatcher_type": "allgather"},
        {"pipeline_model_parallel_size": 2},
        {"moe_fb_overlap": False, "ampipe_degree": 1, "moe_model_type": "megatron_moe"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"swap_attention": True},
    ],
)
def test_what_goes_together(megatron):
    assert not problems(ZERO, {"moe_zero_memory": "level0"}, megatron)
    some = {"moe_zero_memory": "level1", "moe_zero_memory_num_layers": 0}
    assert not problems(ZERO, some, megatron)
    assert not problems(ADAPTIVE, {"moe_adaptive_recompute_activation": True}, megatron)
    together = megatron | {"moe_zero_memory": "level0"}
    assert not problems(ADAPTIVE, {"moe_adaptive_recompute_activation": True}, together)


def test_experts_are_left_alone_by_others_that_decide_the_same():
    said = refusal({"moe_zero_memory": "level0", "recompute_activation_function": True})
    assert "--moe-zero-memory: cannot be combined with --recompute-activation-function" in said
    for feature in (ZERO, ADAPTIVE):
        assert {"activation-plan", "pipe-experts", "recompute-in-advance"} <= set(feature.conflicts)
        assert {"fp8", "fp4", "cpu_offloading"} == set(feature.excludes)


def refusal(flags) -> str:
    with pytest.raises(ConfigError) as refused:
        registry.resolve(JOB | flags, "cpu")
    return str(refused.value)


def test_a_framework_without_arguments_is_not_asked():
    assert not list(ZERO(moe_zero_memory="level1").problems({}))


@pytest.mark.parametrize(
    "other",
    [
        {"moe_fb_overlap": True},
        {"overlap_moe_expert_parallel_comm": True},
        {"moe_experts_pipeline_degree": 2, **TP},
        {"ampipe_degree": 2, "use_flash_attn": True},
        {"use_pipe_experts": True},
        {"balanced_moe_experts": True},
        {"recompute_in_advance": True},
    ],
)
@pytest.mark.parametrize(
    "ours", [{"moe_zero_memory": "level1"}, {"moe_adaptive_recompute_activation": True}]
)
def test_what_computes_layers_in_parts_is_refused_once(ours, other):
    with pytest.raises(ConfigError) as refused:
        registry.resolve(JOB | ours | other, "cpu")
    (name,) = ours
    spellings = (name.replace("_", "-"), name.removesuffix("_activation").replace("_", "-"))
    said = [line for line in str(refused.value).splitlines() if any(s in line for s in spellings)]
    assert len(said) == 1, said
