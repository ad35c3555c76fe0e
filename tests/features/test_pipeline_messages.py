"""Flags about the messages of a pipeline have their effect, or are refused."""

from __future__ import annotations

import re

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.pipeline.multiparameter_pipeline import MultiparameterPipeline
from mindspeed.features.pipeline.optimized_send_recv import OptimizedSendRecv
from mindspeed.features.pipeline.variable_lengths import VariableLengths
from mindspeed.features.registry import resolve

JOB = {
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
}
CHUNKS = {"virtual_pipeline_model_parallel_size": 2}
SEVERAL = {"use_multiparameter_pipeline_model_parallel": True}


class OneSeam:
    """Collects what features attach; all seams are this one."""

    def __init__(self):
        self.functions = []

    def __getattr__(self, name):
        return self

    def add(self, function, owner):
        if "schedule" in getattr(function, "__name__", ""):
            self.functions.append(function)


def megatrons(**_):
    raise AssertionError("never called")


def schedule_of(**flags):
    """What the enabled features make of Megatron's schedule."""
    values = {**JOB, **flags}
    found = resolve(values, "cpu")
    seams, function = OneSeam(), megatrons
    for feature in found.enabled:
        if "schedule" in feature.seams:
            feature.attach(seams, values)
    for schedule in seams.functions:
        function = schedule(function)
    return function


def test_plans_of_the_same_order_run_for_optimized_messages():
    assert schedule_of() is megatrons
    assert schedule_of(optimize_send_recv_comm=True).request.kind == "1f1b"
    chunks = {**CHUNKS, "microbatch_group_size_per_vp_stage": 8}
    assert schedule_of(optimize_vpp_send_recv_comm=True, **chunks).request.group_size == 8


def test_another_schedule_sends_its_messages_in_this_way_already():
    given = {"optimize_send_recv_comm": True, "pipeline_schedule": "zb-h1"}
    assert schedule_of(**given).request.kind == "zb-h1"


def test_declared_shapes_are_those_of_the_arguments_when_a_step_runs():
    values = {**JOB, **SEVERAL}
    seams = OneSeam()
    MultiparameterPipeline(True).attach(seams, values)
    messages = seams.functions[0](megatrons).messages
    assert messages.several_tensors and messages.declared() is None
    values["pipeline_tensor_shapes"] = [{"shape": (1,), "dtype": "float"}]
    assert messages.declared() == values["pipeline_tensor_shapes"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"optimize_send_recv_comm": True, **CHUNKS},
            "--optimize-send-recv-comm: is for one model chunk on a rank, there are 2; give --opt",
        ),
        (
            {"optimize_vpp_send_recv_comm": True},
            "--optimize-vpp-send-recv-comm: is for several model chunks on a rank, there is one",
        ),
        (
            {"optimize_send_recv_comm": True, "pipeline_model_parallel_size": 1},
            "--optimize-send-recv-comm: there is one pipeline rank",
        ),
        (
            {**SEVERAL, "pipeline_model_parallel_size": 1},
            "--use-multiparameter-pipeline-model-parallel: there is one pipeline rank",
        ),
        (
            {**SEVERAL, "overlap_moe_expert_parallel_comm": True},
            "cannot be combined with --overlap-moe-expert-parallel-comm",
        ),
        (
            {**SEVERAL, "pipeline_tensor_shapes": [{"shape": (1,)}]},
            "args.pipeline_tensor_shapes[0] is {'shape': (1,)}; give",
        ),
    ],
)
def test_what_cannot_be_is_refused(flags, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve({**JOB, **flags}, "cpu")


def test_features_have_one_seam():
    for feature in (MultiparameterPipeline, OptimizedSendRecv, VariableLengths):
        assert "schedule" in feature.seams
