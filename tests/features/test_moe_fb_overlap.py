"""``--moe-fb-overlap`` is Megatron's schedule, or refused with the flags that it excludes."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry

ON = {
    "moe_fb_overlap": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
    "fp16": False,
    "pipeline_model_parallel_size": 1,
}
PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("change", "delayed"),
    [
        ({}, True),
        ({"transformer_impl": "local"}, False),
        ({"moe_use_legacy_grouped_gemm": True}, False),
        (PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1, "mtp_num_layers": 1}, True),
        ({"recompute_granularity": "selective"}, True),
    ],
)
def test_it_is_megatrons_schedule(change, delayed):
    values = ON | change
    derived = registry.derived(values)
    assert derived["overlap_moe_expert_parallel_comm"] is True
    assert derived["delay_wgrad_compute"] is delayed
    assert registry.derived(values | derived) == derived


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"moe_model_type": "deepspeed_moe"},
            "combined with --moe-model-type deepspeed_moe",
        ),
        (
            {"moe_shared_expert_overlap": True},
            "combined with --moe-shared-expert-overlap",
        ),
        ({"num_experts": None}, "add --num-experts"),
        ({"expert_model_parallel_size": 1}, "nothing is sent by all-to-all"),
        ({"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type is allgather"),
        ({"bf16": False}, "add --bf16 or --fp16"),
        ({"recompute_granularity": "full"}, "cannot be combined with --recompute-granularity full"),
        (PIPELINE, "give --num-layers-per-virtual-pipeline-stage"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1: at most 1, and only on two"),
    ],
)
def test_what_it_excludes_and_needs(change, said):
    with pytest.raises(ConfigError, match=f"--moe-fb-overlap: .*{said}"):
        registry.derived(ON | change)


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"moe_alltoall_overlap_comm": True}, "--moe-alltoall-overlap-comm"),
        ({"moe_hierarchical_alltoallv": True}, "--moe-hierarchical-alltoallv"),
        ({"moe_experts_pipeline_degree": 2}, "--moe-experts-pipeline-degree"),
        ({"ampipe_degree": 2}, "--ampipe-degree"),
        ({"recompute_in_bubble": True}, "--recompute-in-bubble"),
        ({"swap_attention": True}, "--swap-attention"),
        ({"optimized_pipeline": True}, "--optimized-pipeline"),
        ({"fold_mode": "aiao"}, "--fold-mode"),
    ],
)
def test_it_is_alone_with_the_parts_of_a_layer(change, other):
    with pytest.raises(ConfigError, match=f"--moe-fb-overlap: cannot be combined with {other}"):
        registry.resolve(ON | change, "cpu")


def test_experts_may_keep_less_but_no_second_product_hides():
    found = registry.resolve(ON | {"moe_zero_memory": "level0", "num_layers": 4}, "cpu")
    assert {"moe-fb-overlap", "moe-zero-memory"} <= {one.name for one in found.enabled}
    said = "--moe-zero-memory level1: cannot be combined with --moe-fb-overlap.* level0"
    with pytest.raises(ConfigError, match=said):
        registry.resolve(ON | {"moe_zero_memory": "level1", "num_layers": 4}, "cpu")


CHUNKS = PIPELINE | {"virtual_pipeline_model_parallel_size": 2, "num_layers": 8}
STEP = {"global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 2}


@pytest.mark.parametrize(
    "schedule",
    [
        {"pipeline_schedule": "zb-v", "virtual_pipeline_model_parallel_size": None},
        {"schedules_method": "dualpipev", "virtual_pipeline_model_parallel_size": None},
        {"pipeline_schedule": "interleaved"},
        {"use_nanopipe": True},
    ],
)
def test_schedules_of_ours_run_in_pairs(schedule):
    values = {**ON, **CHUNKS, **STEP, **schedule}
    found = registry.resolve(values | registry.derived(values), "cpu")
    assert "moe-fb-overlap" in {feature.name for feature in found.enabled}
    for name in ("dualpipev", "nanopipe", "pipeline-schedule"):
        if name in {feature.name for feature in found.enabled}:
            shown = getattr(found.features[name], "_changes", lambda _: {"pairs": True})(values)
            assert shown["pairs"]


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1", "aiao", "auto"])
def test_schedules_without_pairs_are_refused(schedule):
    with pytest.raises(ConfigError, match=rf"{schedule}: has no pairs.* zb-v, dualpipev has"):
        registry.resolve({**ON, **CHUNKS, **STEP, "pipeline_schedule": schedule}, "cpu")


def test_megatrons_own_flag_does_not_hide_flags_without_effect():
    values = {"overlap_moe_expert_parallel_comm": True, "moe_permutation_async_comm": True}
    said = "--overlap-moe-expert-parallel-comm: cannot be .* --moe-permutation-async-comm"
    with pytest.raises(ConfigError, match=said):
        registry.resolve(values, "cpu")
    registry.resolve({"overlap_moe_expert_parallel_comm": True}, "cpu")
