"""``--fold-mode`` chooses an order of model chunks, or is refused."""

from __future__ import annotations

import argparse
import logging
import re
from types import SimpleNamespace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.pipeline.fold3d import Fold3D

JOB = {
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "global_batch_size": 32,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
    "overlap_grad_reduce": True,
}


def resolve(**flags):
    return registry.resolve({**JOB, **flags}, "cpu")


@pytest.mark.parametrize(
    "flags",
    [
        {"fold_mode": "aiao"},
        {"fold_mode": "aiao", "fold_order": "strict"},
        {"fold_mode": "fifo"},
        {"fold_mode": "aiao", "pipeline_schedule": "aiao"},
    ],
)
def test_orders_are_taken(flags):
    assert Fold3D.name in {feature.name for feature in resolve(**flags).enabled}


def test_the_name_of_the_original_is_the_same_flag():
    parser = registry.add_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--foldx-mode", "aiao"]).fold_mode == "aiao"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"fold_mode": "aiao", "virtual_pipeline_model_parallel_size": None},
            "--fold-mode aiao: needs several model chunks on each pipeline rank; give --num-layers",
        ),
        ({"fold_mode": "aiao", "pipeline_model_parallel_size": 1}, "there is one pipeline rank"),
        ({"fold_mode": "gpipe"}, "--fold-mode 'gpipe': choose one of aiao, fifo"),
        ({"fold_order": "strict"}, "--fold-order strict: has no effect without --fold-mode aiao"),
        (
            {"fold_mode": "fifo", "fold_order": "strict"},
            "--fold-order strict: has no effect without --fold-mode aiao",
        ),
        (
            {"fold_mode": "aiao", "pipeline_schedule": "interleaved"},
            "--fold-mode aiao: cannot be combined with --pipeline-schedule interleaved",
        ),
        ({"fold_mode": "aiao", "use_nanopipe": True}, "two schedules"),
        ({"fold_mode": "aiao", "pipeline_memory_limit": 1.0}, "rank 0 keeps"),
        ({"fold_mode": "aiao", "global_batch_size": 4}, "too few"),
    ],
)
def test_what_cannot_be_is_refused(flags, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve(**flags)


@pytest.mark.parametrize(
    ("flags", "warns"),
    [({}, False), ({"overlap_grad_reduce": False}, True), ({"data_parallel_size": 1}, True)],
)
def test_nothing_to_hide_is_said(flags, warns, caplog):
    seams = SimpleNamespace(schedule=SimpleNamespace(add=lambda *_, **__: None))
    with caplog.at_level(logging.WARNING, logger="mindspeed"):
        Fold3D(fold_mode="aiao").attach(seams, {**JOB, **flags})
    assert ("no reduction of gradients can be hidden" in caplog.text) == warns


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        (Fold3D("aiao"), {"kind": "aiao"}),
        (Fold3D("aiao", "strict"), {"kind": "aiao", "strict": True}),
        (Fold3D("fifo"), {"kind": "interleaved"}),
    ],
)
def test_the_order_is_the_one_that_the_flags_name(feature, changes):
    added = []
    seams = SimpleNamespace(
        schedule=SimpleNamespace(add=lambda function, owner: added.append(function))
    )
    feature.attach(seams, JOB)
    request = added[0](None).request
    assert {name: getattr(request, name) for name in changes} == changes
