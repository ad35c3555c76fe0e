"""``--pipeline-schedule`` is refused before training wherever it cannot be what it says."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.pipeline.pipeline_schedule import PipelineSchedule
from mindspeed.features.pipeline.plans import limit_of
from mindspeed.features.registry import derived, resolve
from mindspeed.pipeline.schedule import auto
from mindspeed.pipeline.schedule.csv_file import write_plan
from mindspeed.pipeline.schedule.placement import Placement
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan

JOB = {
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
}
ALL_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform"}
CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def names(**flags):
    return {feature.name for feature in resolve({**JOB, **flags}, "cpu").enabled}


def test_without_flags_megatrons_own_schedules_run():
    assert PipelineSchedule.name not in names()


@pytest.mark.parametrize(
    "flags",
    [
        {"pipeline_schedule": "1f1b"},
        {"pipeline_schedule": "zb-h1", "pipeline_memory_limit": 1.0},
        {"pipeline_schedule": "zb-v", **ALL_LAYERS},
        {"pipeline_schedule": "1f1b", "pipeline_schedule_dump": "plan.csv"},
        {"pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_schedule": "aiao", "virtual_pipeline_model_parallel_size": 2},
    ],
)
def test_possible_schedules_are_taken(flags):
    assert PipelineSchedule.name in names(**flags)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"pipeline_schedule": "gpipe"}, "--pipeline-schedule gpipe: no such schedule; choose one"),
        ({"pipeline_schedule": "interleaved"}, "--num-layers-per-virtual-pipeline-stage"),
        (
            {"pipeline_schedule": "1f1b", "pipeline_model_parallel_size": 1},
            "--pipeline-schedule 1f1b: there is one pipeline rank",
        ),
        (
            {"pipeline_schedule": "1f1b", "pipeline_memory_limit": 0.5},
            "--pipeline-schedule 1f1b: the pipeline schedule 1f1b: rank 0 keeps 3 A",
        ),
        (
            {
                "pipeline_schedule": "interleaved",
                "virtual_pipeline_model_parallel_size": 2,
                "rampup_batch_size": ["4", "2", "8"],
            },
            "2 micro-batches are too few",
        ),
        (
            {
                "pipeline_schedule": "aiao",
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 4,
            },
            "decides itself what --microbatch-group-size-per-virtual-pipeline-stage 4 says",
        ),
        (
            {"pipeline_schedule": "1f1b", "adaptive_memory_optimization": True},
            "cannot be combined with --adaptive-memory-optimization",
        ),
        ({"pipeline_memory_limit": 1.0}, "--pipeline-memory-limit: has no effect"),
        ({"pipeline_memory_limit": 0.0}, "--pipeline-memory-limit 0"),
        ({"pipeline_schedule_dump": "x.csv"}, "--pipeline-schedule-dump: has no effect"),
        ({"pipeline_trace": "x"}, "--pipeline-trace: has no effect on Megatron's own schedules"),
        ({"pipeline_costs": "1,1,1"}, "--pipeline-costs: has no effect"),
        (
            {"pipeline_schedule": "zb-h1", "pipeline_costs": "1,x,1"},
            "--pipeline-costs 1,x,1: 3 to 5 numbers with commas are expected",
        ),
        (
            {"pipeline_schedule": "v-half", "pipeline_memory_limit": 0.5},
            "v-half needs 3 A of activations; 2 A are allowed (--pipeline-memory-limit). v-auto",
        ),
        (
            {"pipeline_schedule": "v-auto", "pipeline_memory_limit": 0.2},
            "the smallest one needs 1 A (building block: steps",
        ),
        (
            {"pipeline_schedule": "1f1b", "cuda_graph_impl": "local"},
            "cannot be combined with --cuda-graph-impl local",
        ),
        (
            {"pipeline_schedule": "zb-h1", "overlap_moe_expert_parallel_comm": True},
            "--pipeline-schedule zb-h1: has no pairs of a forward and a backward; one of 1f1b,",
        ),
        (
            {"pipeline_schedule": "zb-h1", **ALL_LAYERS},
            "--pipeline-schedule zb-h1: has no effect, no backward is divided",
        ),
        ({"pipeline_schedule": "absent.csv"}, "absent.csv"),
    ],
)
def test_impossible_schedules_are_refused(flags, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        names(**flags)


def test_the_group_size_of_megatrons_schedule_is_kept(tmp_path):
    chunks = {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 8}
    values = {**JOB, **chunks, "pipeline_schedule": "interleaved"}
    feature = resolve(values, "cpu").features[PipelineSchedule.name]
    assert feature._changes(values) == {"kind": "interleaved", "group_size": 8}


@pytest.mark.parametrize(
    ("change", "job", "text"),
    [
        (("0F1", "0Q1"), {}, "line 1, column 2: '0Q1' is no action"),
        (("1F1,1B1", "1B1,1F1"), {}, "1B1"),
        ((",0B1", ""), {}, "0"),
        (("", ""), {"pipeline_model_parallel_size": 4}, "pipeline ranks"),
        (("", ""), {"global_batch_size": 4}, "micro-batches"),
        (("", ""), {"virtual_pipeline_model_parallel_size": 2}, "stages on rank 0"),
        (("", ""), {"rampup_batch_size": ["2", "2", "8"]}, "--rampup-batch-size"),
    ],
)
def test_a_file_that_is_no_schedule_of_this_job_is_refused(tmp_path, change, job, text):
    path = tmp_path / "plan.csv"
    small = {**JOB, "pipeline_model_parallel_size": 2, "global_batch_size": 2}
    small |= {"data_parallel_size": 1, "pipeline_schedule": str(path)}
    path.write_text(CSV)
    resolve(small, "cpu")
    path.write_text(CSV.replace(*change, 1))
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve({**small, **job}, "cpu")


def test_a_file_with_a_deadlock_is_refused_with_the_chain(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    flags = {"global_batch_size": 2, "data_parallel_size": 1, "pipeline_schedule": str(path)}
    with pytest.raises(ConfigError, match="waits"):
        resolve({**JOB, "pipeline_model_parallel_size": 2, **flags}, "cpu")


def test_a_file_that_places_its_stages_needs_no_flag_of_chunks(tmp_path):
    path = tmp_path / "plan.csv"
    flags = {"global_batch_size": 1, "data_parallel_size": 1, "pipeline_schedule": str(path)}
    flags |= {"pipeline_model_parallel_size": 2}
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    names = {feature.name for feature in resolve({**JOB, **flags}, "cpu").enabled}
    assert {"dualpipev", "pipeline-schedule"} <= names
    path.write_text("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n")
    for chunks in (None, 2):
        resolve({**JOB, **flags, "virtual_pipeline_model_parallel_size": chunks}, "cpu")


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 4)])
def test_a_limit_of_one_is_what_megatrons_schedule_keeps(ranks, chunks):
    request = ScheduleRequest(kind="1f1b" if chunks == 1 else "interleaved")
    for factor in (1.0, 0.99):
        limited = replace(request, memory_limit=limit_of(factor, ranks, chunks))
        with pytest.raises(ConfigError) if factor < 1 else nullcontext():
            build_plan(limited, ranks, chunks, 4 * ranks)


AUTO = {"pipeline_schedule": "auto", "pipeline_memory_limit": 1.0}
WITHIN = {**JOB, "num_layers": 16, "global_batch_size": 16, "data_parallel_size": 1}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"pipeline_memory_limit": 0.6}, True),
        ({"pipeline_memory_limit": None}, False),
        ({"virtual_pipeline_model_parallel_size": 2}, False),  # a loop was asked for
        ({"num_layers": 12}, False),  # no eight equal stages
        ({"swap_attention": True}, False),
        ({"data_parallel_size": None}, False),  # before Megatron's checks
        ({"pipeline_costs": "1,1,1,4"}, False),  # a V has twice the messages
    ],
)
def test_auto_takes_a_v_within_a_limit_where_it_is_faster(change, taken):
    found = derived({**WITHIN, **AUTO, **change})
    assert found.get("pipeline_schedule") == ("v-auto" if taken else None)


def test_pairs_without_collectives_are_taken_and_their_price_is_said(tmp_path, caplog):
    path = tmp_path / "pairs.csv"
    write_plan(path, build_plan(ScheduleRequest(kind="dualpipev", pairs=True), 4, 2, 16))
    flags = {"pipeline_schedule": str(path), "num_layers": 16, "data_parallel_size": 1}
    with caplog.at_level("WARNING", logger="mindspeed"):
        resolve({**JOB, **flags}, "cpu")
    (said,) = (record.getMessage() for record in caplog.records)
    assert re.search(r"pairs.csv: its \d+ pairs run one member after the other", said)
    assert "as pairs they would make a step 3.0% longer" in said


FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


def test_a_start_searches_a_v_and_a_loop_once(monkeypatch):
    """Checks of flags and the first step ask for the same schedule."""
    searched, begin = [], auto._Search.__init__

    def counted(self, placement, job, limit):
        searched.append((placement, job.num_microbatches))
        begin(self, placement, job, limit)

    monkeypatch.setattr(auto._Search, "__init__", counted)
    for cached in (auto._searched, auto.v_is_faster):
        cached.cache_clear()
    values = {**JOB, **AUTO, "num_layers": 8, "pipeline_memory_limit": 0.6}
    values |= derived(values)
    resolve(values, "cpu")
    pipeline = schedule_of(values)
    plan = build_plan(pipeline.request, 4, 2, 8)
    assert plan.name == "auto" and not plan.placement.loops
    assert searched == [(Placement.v_shape(4), 8), (Placement.loop(4), 8)]


def schedule_of(values):
    """The pipeline that the feature hands to the seam."""
    feature, found = PipelineSchedule(**{name: values[name] for name in AUTO}), []
    feature.attach(SimpleNamespace(schedule=Seam(found), chunk=Seam([])), values)
    return found[0](None)


class Seam:
    def __init__(self, found):
        self.found = found

    def add(self, function, owner):
        self.found.append(function)


@pytest.mark.parametrize(
    "schedule", ["zb-h1", "nanopipe", "zb-v", "dualpipev", "v-half", "v-min", "v-auto", "auto"]
)
def test_sharded_gradients_are_refused_with_the_reason(schedule):
    """Megatron-FSDP, which is ZeRO 2 and 3, has no pipeline, whatever its schedule."""
    with pytest.raises(ConfigError) as error:
        resolve({**JOB, "num_layers": 16, "pipeline_schedule": schedule, **FSDP}, "cpu")
    assert "FSDP reduces gradients by hooks" in str(error.value)
    assert "its groups are made of all ranks" in str(error.value)
