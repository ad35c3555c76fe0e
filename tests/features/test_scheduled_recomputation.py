"""What ``--recompute-in-bubble`` and ``--recompute-in-advance`` can be combined with."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve

SIZES = {
    "num_layers": 8,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "bf16": True,
    "optimization_level": 2,
}
BUBBLE = {"recompute_in_bubble": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}
ADVANCE = {"recompute_in_advance": True, **FULL}


def problems(flags, **more) -> str:
    try:
        resolve({**SIZES, **flags, **more}, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("flags", [BUBBLE, ADVANCE], ids=["bubble", "advance"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"recompute_norm": True, "recompute_activation_function": True},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"num_experts": 4, "expert_model_parallel_size": 2},
    ],
    ids=str,
)
def test_what_can_be_combined(flags, more):
    assert problems(flags, **more) == ""


def test_counts_of_layers_that_can_be_combined():
    assert problems(BUBBLE, recompute_num_layers=0) == ""
    assert problems(ADVANCE, enable_recompute_layers_per_pp_rank=True) == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            {"virtual_pipeline_model_parallel_size": None},
            ["needs several model chunks", "reorders them", "--num-layers-per-virtual-pipeline-"],
        ),
        ({"recompute_granularity": "selective"}, ["--recompute-granularity selective"]),
        (FULL, ["--recompute-granularity full", "remove one"]),
        ({"recompute_in_advance": True, **FULL}, ["recompute-in-bubble", "recompute-in-advance"]),
    ],
    ids=str,
)
def test_what_recomputation_in_bubbles_refuses(flags, named):
    said = problems(BUBBLE, **flags)
    assert all(words in said for words in ["--recompute-in-bubble", *named]), said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (
            {"virtual_pipeline_model_parallel_size": None},
            ["needs several model chunks", "waits for a gradient"],
        ),
        ({"recompute_granularity": None}, ["needs --recompute-granularity full, not given"]),
        ({"recompute_granularity": "selective"}, ["--recompute-granularity full, not selective"]),
        ({"recompute_method": "uniform"}, ["needs --recompute-method block, not uniform"]),
        ({"recompute_method": None}, ["needs --recompute-method block, not given"]),
        ({"recompute_num_layers": None}, ["--recompute-num-layers of at least 1, not given"]),
        ({"recompute_num_layers": 0}, ["--recompute-num-layers of at least 1, not 0"]),
    ],
    ids=str,
)
def test_what_recomputation_in_advance_refuses(flags, named):
    said = problems(ADVANCE, **flags)
    assert all(words in said for words in ["--recompute-in-advance", *named]), said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swap_attention", True),
        ("adaptive_recompute_device_size", 100),
        ("adaptive_recompute_device_swap", True),
        ("adaptive_memory_optimization", True),
        ("optimize_recomp_communication_level", 1),
        ("distribute_saved_activations", True),
        ("fine_grained_activation_offloading", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("hybrid_context_parallel", True),
    ],
)
@pytest.mark.parametrize("flags", [BUBBLE, ADVANCE], ids=["bubble", "advance"])
def test_what_both_refuse(flags, name, value):
    said = [line for line in problems(flags, **{name: value}).splitlines() if "combined" in line]
    assert any(f"--{name.replace('_', '-')}" in line for line in said)


def test_files_that_recompute_are_refused_with_other_recomputation(tmp_path):
    from mindspeed.pipeline.schedule.csv_file import write_plan
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

    file = tmp_path / "plan.csv"
    write_plan(file, build_plan(ScheduleRequest(recompute="bubble"), 2, 2, 8))
    step = {"global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 1}
    given = {"pipeline_schedule": str(file), **step}
    assert problems(given) == ""
    assert "--recompute-granularity full does" in problems(given, **FULL)
    assert "--swap-attention" in problems(given, swap_attention=True)
    assert "are two schedules" in problems(given, **BUBBLE)
