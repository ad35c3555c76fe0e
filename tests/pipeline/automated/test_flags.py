"""Flags of the automated pipeline: what follows from a result, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.pipeline.automated_pipeline import job_of
from mindspeed.features.registry import derived, resolve
from mindspeed.pipeline.automated.result import write_result
from mindspeed.pipeline.automated.search import search
from mindspeed.pipeline.automated.stages import StageChoice
from tests.pipeline.automated.test_search import profile

JOB = {
    "num_layers": 9,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 128,
    "micro_batch_size": 1,
    "pipeline_model_parallel_size": 3,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
}


@pytest.fixture
def written(tmp_path):
    """Arguments of a start that finds a result, and the result."""
    path = tmp_path / "plan.json"
    result = write_result(path, search(profile()), job_of(JOB))
    return {**JOB, "automated_pipeline": True, "automated_pipeline_file": str(path)}, result


def test_a_result_becomes_the_flags_of_the_same_run(written):
    values, result = written
    found = derived(values)
    assert found["num_layer_list"] == ",".join(str(count) for (count,) in result.layers)
    assert found["recompute_module_list"] == ",".join(map(str, result.recompute))
    by_hand = derived({**JOB, **result.values()})
    assert found["pipeline_model_parallel_layout"] == by_hand["pipeline_model_parallel_layout"]
    again = derived({**values, **found})
    assert {name: again[name] for name in found} == found


def test_a_result_with_sizes_is_dynamic_pipeline_parallelism(tmp_path):
    path = tmp_path / "plan.json"
    found = search(profile(), "perf")
    sizes = StageChoice(found.choice.layers, (0, 0, 0), sizes=(1, 2, 3, 3, 2, 1))
    write_result(path, replace(found, choice=sizes), job_of(JOB))
    values = {**JOB, "automated_pipeline_perf": True, "automated_pipeline_file": str(path)}
    assert derived(values)["manual_mbs"] == "1,2,3,3,2,1"
    assert derived(values)["optimized_pipeline"] is True
    assert derived({"optimized_mbs_list": "1,2,1"})["manual_mbs"] == "1,2,1"


def test_memory_mode_switches_recomputation_and_noop_layers_off(tmp_path):
    values = {
        **JOB,
        "automated_pipeline": True,
        "automated_pipeline_file": str(tmp_path / "none.json"),
        "num_layers": 11,
        "noop_layers": "0,10",
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_activation_function": True,
    }
    assert derived(values) == {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_activation_function": False,
        "noop_layers": (),
        "num_layers": 9,  # the same model
    }


OTHER = {
    "another model": ({"hidden_size": 32}, "hidden_size 64, not 32"),
    "other ranks": ({"pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size 3, not 4"),
    "virtual stages": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        "1 virtual stages per rank, not 2",
    ),
    "another mode": ({"automated_pipeline_perf": True}, "is a result of --automated-pipeline;"),
    "layers too": ({"num_layer_list": "4,4,1"}, "cannot be combined with --num-layer-list 4,4,1"),
    "schedule too": ({"pipeline_schedule": "aiao"}, "with --pipeline-schedule aiao: it chooses"),
    "recomputation too": ({"recompute_module_list": "0,0,3"}, "with --recompute-module-list 0,0,3"),
}


@pytest.mark.parametrize("name", OTHER)
def test_a_result_of_another_job_is_refused(name, written):
    change, message = OTHER[name]
    with pytest.raises(ConfigError) as error:
        derived({**written[0], **change})
    assert message in str(error.value)


def test_a_broken_result_is_refused(written, tmp_path):
    (tmp_path / "plan.json").write_text('{"version": 1, "mode": "memory"}')
    with pytest.raises(ConfigError, match=r"plan\.json: job is missing"):
        derived(written[0])


MANY = {"num_layer_list": "4,4,1", "pipeline_model_parallel_layout": "Etttt|tttt|tL"}
WRONG = {
    "one rank": (
        {"automated_pipeline": True, "pipeline_model_parallel_size": 1},
        "--automated-pipeline: needs --pipeline-model-parallel-size of at least 2",
    ),
    "perf with virtual stages": (
        {"automated_pipeline_perf": True, "virtual_pipeline_model_parallel_size": 2},
        "--automated-pipeline-perf: cannot be combined with virtual pipeline stages",
    ),
    "ratio": ({"automated_pipeline": True, "save_memory_ratio": 1.5}, "--save-memory-ratio 1.5"),
    "ratio alone": ({"save_memory_ratio": 0.5}, "has no effect without --automated-pipeline"),
    "type alone": ({"recompute_type": 0}, "has no effect without --recompute-module-list"),
    "type": ({"recompute_module_list": "1,0,0", "recompute_type": 3}, "--recompute-type 3"),
    "words": ({"recompute_module_list": "1,x,0"}, "1,x,0: whole numbers with commas"),
    "ranks of the list": ({"recompute_module_list": "1,0"}, "1,0 has 2 ranks"),
    "too many": ({"recompute_module_list": "4,0,0"}, "rank 0 has 3 layers, not 4"),
    "too many of a layout": ({"recompute_module_list": "4,0,2", **MANY}, "rank 2 has 1 layers"),
    "recomputed twice": (
        {"recompute_module_list": "1,0,0", "recompute_granularity": "full"},
        "cannot be combined with --recompute-granularity full",
    ),
    "second start": ({"mbs_idx": 1}, "--mbs-idx: is a state of the original's second start"),
    "list of schedules": ({"pp_schedule_list": "[[1]]"}, "--pipeline-schedule takes a name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses(name):
    change, message = WRONG[name]
    with pytest.raises(ConfigError) as error:
        resolve({**JOB, **change}, "cpu")
    assert message in str(error.value)
