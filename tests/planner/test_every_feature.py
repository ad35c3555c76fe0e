"""Every flag of every feature: counted as real ranks count, counted, or refused by name."""

from __future__ import annotations

import pytest

import mindspeed.megatron_adaptor
from mindspeed.features.registry import all_features
from mindspeed.flags import flags_of
from tests.planner import test_counts, test_counts_context, test_counts_experts
from tests.planner import test_counts_pipeline as pipeline
from tests.planner.tried_flags import NOT_COUNTED, TRIED, WEEKLY, outcomes
from tests.support.trainer_job import SETUP

assert mindspeed.megatron_adaptor
WITHOUT_A_STEP = {
    "auto-tuning",  # plans instead: taken away from what is planned (mindspeed.planner.job)
    "automated-pipeline",  # its options are for results that a run has measured
    "moe-log-load",  # counts in messages that are sent anyway
    "moe-record-routing",
    "hccl-group-buffer",  # sizes of the library's buffers
    "profiling",
    "guard",
    "record",
    "type-check",  # before training, in a process of its own
}
"""Features whose options change nothing that is counted; one flag of each is tried."""


def test_every_flag_is_compared_or_tried():
    words = {word for flags in TRIED.values() for word in flags.split()}
    for module in (test_counts, test_counts_context, test_counts_experts, pipeline):
        words |= {word for case in module.CASES.values() for word in case[1].split()}
    for feature in all_features():
        for flag in flags_of(feature):
            negative = f"--no-{flag.option[2:]}"
            if feature.name not in WITHOUT_A_STEP:
                assert {flag.option, negative} & words, f"{flag.option} of {feature.name}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted(TRIED.keys() - WEEKLY), id="each feature"),
        pytest.param(sorted(WEEKLY), id="others", marks=pytest.mark.weekly),
    ],
)
def test_what_is_tried_is_counted_or_refused_by_name(ranks, tmp_path, names):
    env = {"LOCAL_WORLD_SIZE": "2"}
    options = {"setup": SETUP, "backend": None, "timeout": 300, "env": env}
    (found,) = ranks(1, outcomes, str(tmp_path), names, **options)
    assert not {
        name: said
        for name, said in found.items()
        if not said.startswith(NOT_COUNTED.get(name, "counted"))
    }
