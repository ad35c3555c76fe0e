"""``--use-nanopipe`` is refused before training wherever it cannot be what it says."""

from __future__ import annotations

import re

import pytest

from mindspeed import te
from mindspeed.errors import ConfigError
from mindspeed.features.pipeline.divided_backward import costs_of
from mindspeed.features.pipeline.nanopipe import Nanopipe, _host_check
from mindspeed.features.registry import resolve
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate

JOB = {
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "global_batch_size": 32,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
    "num_layers": 16,
    "hidden_size": 64,
}
NANO = {"use_nanopipe": True}
ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"virtual_pipeline_model_parallel_size": None},
        {"use_nanopipe_swap": True},
        {"pipeline_schedule": "nanopipe"},
        {"pipeline_memory_limit": 1.0},
        {"microbatch_group_size_per_vp_stage": 8},
        {**ALL_LAYERS, "pipeline_memory_limit": 2.0},
        {**ALL_LAYERS, "recompute_method": "block", "recompute_num_layers": 1},
    ],
)
def test_possible_jobs(flags):
    enabled = {feature.name for feature in resolve({**JOB, **NANO, **flags}, "cpu").enabled}
    assert Nanopipe.name in enabled
    assert Nanopipe.name not in {feature.name for feature in resolve(JOB, "cpu").enabled}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"use_nanopipe": False, "use_nanopipe_swap": True},
            "--use-nanopipe-swap: moves what weight gradients of --use-nanopipe need; add",
        ),
        ({"pipeline_model_parallel_size": 1}, "--use-nanopipe: there is one pipeline rank"),
        (
            {"global_batch_size": 4},
            "--use-nanopipe: 2 micro-batches are too few for 4 pipeline ranks with 2 model chunks",
        ),
        (
            {"rampup_batch_size": ["4", "4", "100"]},
            "--use-nanopipe: 2 micro-batches are too few for 4 pipeline ranks",
        ),
        ({"tp_2d": True, "tp_x": 1, "tp_y": 1}, "--use-nanopipe: cannot be combined with --tp-2d"),
        ({"adaptive_memory_optimization": True}, "adaptive-memory"),
        (
            {"pipeline_schedule": "zb-h1"},
            "combined with --pipeline-schedule zb-h1: they are",
        ),
        (
            {"schedules_method": "dualpipev"},
            "combined with --schedules-method: they are two",
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "use_nanopipe_swap": True},
            "pairs of --pipeline-schedule nanopipe cannot be combined with",
        ),
        (
            {"use_transformer_engine_op_fuser": True},
            "--use-nanopipe: cannot be combined with --use-transformer-engine-op-fuser",
        ),
        ({"pipeline_memory_limit": 0.3}, "--use-nanopipe: .* A of activations at"),
        (ALL_LAYERS, "--use-nanopipe: has no effect, no backward is divided.* larger --pipeline"),
        (
            {**ALL_LAYERS, "use_nanopipe_swap": True, "virtual_pipeline_model_parallel_size": None},
            "--use-nanopipe: has no effect",
        ),
    ],
)
def test_impossible_jobs_are_refused(flags, text):
    with pytest.raises(ConfigError) as refused:
        resolve({**JOB, **NANO, **flags}, "cpu")
    assert re.search(text, str(refused.value)), refused.value


def test_the_group_size_of_megatrons_schedule_is_kept():
    values = {**JOB, **NANO, "microbatch_group_size_per_vp_stage": 8}
    changes = resolve(values, "cpu").features[Nanopipe.name]._changes(values)
    ours = simulate(build_plan(ScheduleRequest(**changes), 4, 2, 16))
    megatrons = simulate(build_plan(ScheduleRequest(group_size=8), 4, 2, 16))
    assert ours.peak_memory[0] == megatrons.peak_memory[0] == 7.5
    assert ours.makespan < megatrons.makespan


def test_the_layers_of_nvidias_engine_are_refused(monkeypatch):
    monkeypatch.setattr(te, "choose", lambda device: ("native", ""))
    with pytest.raises(ConfigError, match=r"--use-nanopipe: computes .*; unset MINDSPEED_TE"):
        resolve({**JOB, **NANO}, "cpu")


def test_recomputed_layers_keep_the_memory_of_megatrons_schedule():
    full = {"recompute_granularity": "full", "recompute_num_layers": 1, **JOB}
    assert costs_of(JOB) == Costs()
    assert costs_of({**full, "recompute_method": "uniform"}).weight_share == 16
    half = costs_of({**full, "recompute_method": "block"})
    assert (half.input_gradient, half.weight_share) == (1.5, 32 / 18)
    costs = costs_of({**full, "recompute_method": "uniform"})
    plain = simulate(build_plan(ScheduleRequest(), 4, 2, 16), costs)
    nano = simulate(build_plan(ScheduleRequest(kind="nanopipe", costs=costs), 4, 2, 16), costs)
    assert nano.peak_memory == plain.peak_memory
    # A weight gradient that waits keeps 16 times what the forward did: none may wait.
    assert (plain.makespan, nano.makespan, nano.counts["I"]) == (70.0, 70.0, 0)
    partly = simulate(build_plan(ScheduleRequest(kind="nanopipe", costs=half), 4, 2, 16), half)
    assert partly.counts["I"] and max(partly.peak_memory) == max(plain.peak_memory)


def test_host_memory_that_is_too_small_for_stashes_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check, petabyte = _host_check(JOB), 1 << 50
    check(4, petabyte)  # of rank 0, which moves none
    check(6, 1 << 10)
    said = (
        r"--use-nanopipe-swap: .* \(1,073,741,824.0 MiB for each of 4 backwards whose weight "
        r"gradients wait, 4 ranks on this host\).*; remove --use-nanopipe-swap"
    )
    with pytest.raises(ConfigError, match=said):
        check(6, petabyte)
