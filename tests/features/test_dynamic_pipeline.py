"""``--optimized-pipeline`` takes sizes that make up a step, and refuses all others."""

from __future__ import annotations

import re

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.pipeline.schedule.size_search import sizes_of_arguments

JOB = {
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 128,
    "micro_batch_size": 4,
    "data_parallel_size": 2,
}
RAMP = (1, 2, 3, 4, *[5] * 9, 4, 3, 2)


def arguments(**flags):
    return {**JOB, "optimized_pipeline": True, **flags}


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"manual_mbs": "example-config-1"}, RAMP),
        ({"manual_mbs": ",".join(map(str, RAMP))}, RAMP),
        ({"optimized_pipeline": False}, None),
    ],
)
def test_sizes_are_those_that_are_given(flags, sizes):
    assert sizes_of_arguments(arguments(**flags)) == sizes
    resolve(arguments(**flags), "cpu")


def test_sizes_are_searched_within_the_memory_limit():
    free = sizes_of_arguments(arguments())
    assert (len(free), sum(free), max(free)) == (16, 64, 5)
    limited = {"micro_batch_size": 8, "global_batch_size": 256, "pipeline_memory_limit": 1.125}
    assert max(sizes_of_arguments(arguments(**limited))) == 9
    resolve(arguments(**limited), "cpu")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"optimized_pipeline": False, "manual_mbs": "1,2"},
            "--manual-mbs: has no effect without --optimized-pipeline",
        ),
        (
            {"pipeline_model_parallel_size": 1},
            "--optimized-pipeline: there is one pipeline rank",
        ),
        ({"rampup_batch_size": ["8", "8", "64"]}, "cannot be combined with --rampup-batch-size"),
        ({"decrease_batch_size_if_needed": True}, "--decrease-batch-size-if-needed"),
        ({"micro_batch_size": 1}, "has no effect with --micro-batch-size 1"),
        ({"manual_mbs": "4,4"}, "--manual-mbs: 2 sizes are given and a step has 16"),
        (
            {"manual_mbs": "example-config-2"},
            "--manual-mbs: example-config-2 needs --pipeline-model-parallel-size 8, not 4 and",
        ),
        (
            {"manual_mbs": "example-config-1", "pipeline_memory_limit": 1.0},
            "--optimized-pipeline: the pipeline schedule 1f1b: rank 0 keeps",
        ),
        ({"cuda_graph_impl": "local"}, "cannot be combined with --cuda-graph-impl local"),
    ],
)
def test_what_cannot_be_is_refused(flags, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve(arguments(**flags), "cpu")


def test_sizes_need_a_batch_size():
    with pytest.raises(ConfigError, match="needs --global-batch-size, --micro-batch-size and the"):
        sizes_of_arguments({"optimized_pipeline": True, "pipeline_model_parallel_size": 2})
