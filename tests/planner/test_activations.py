"""The plan of activations for a budget, made without a device, fits to the byte."""

from __future__ import annotations

import json

import pytest

from tests.planner import activations_job as jobs
from tests.planner.real_and_fake import SMALL as SMALL_MODEL

SETUP = "tests.support.warm"
SMALL, MIDDLE, LARGE = 3_500_000, 4_500_000, 8_000_000
HELD_BY_GLOO = 64
"""Bytes of scalars that a thread of gloo, if it gets no core, holds for longer than the program."""


@pytest.fixture(scope="module")
def plans(rank_pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("plans"))
    budgets = [SMALL, MIDDLE, LARGE]
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    (found,) = rank_pool.run(1, jobs.planned, budgets, 2, folder, **options)
    return dict(zip(budgets, found, strict=True))


@pytest.mark.slow
def test_the_plan_fits_and_its_file_needs_the_same_bytes(plans):
    plan, flags, peaks = plans[MIDDLE]
    assert plan.fits
    assert flags[0] == "--activation-plan"
    assert peaks == [stage.peak for stage in plan.stages]
    assert max(peaks) <= MIDDLE
    assert all(stage.least <= stage.peak for stage in plan.stages)
    assert any(sites for stage in plan.stages for _, sites in stage.layers)


@pytest.mark.slow
def test_everything_is_kept_where_it_fits(plans):
    plan, flags, peaks = plans[LARGE]
    assert (plan.rules(), flags) == ({}, [])
    assert peaks == [stage.peak for stage in plan.stages]
    assert max(peaks) > MIDDLE
    assert [stage.seconds for stage in plan.stages] == [0.0, 0.0]


@pytest.mark.slow
def test_nothing_fits_names_the_smallest_peak(plans):
    assert "no plan fits into 3.3 MiB: the smallest predicted peak is" in plans[SMALL]


@pytest.mark.slow
def test_the_choice_is_that_of_the_feature_in_a_job_with_the_same_figures(plans, ranks):
    plan, *_ = plans[MIDDLE]
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    found = ranks(2, jobs.chosen_by_the_feature, MIDDLE, **options)
    assert [_choice(stage) for stage in found] == [_choice(stage) for stage in plan.stages]
    more = [
        real - planned
        for one, stage in zip(found, plan.stages, strict=True)
        for real, planned in zip(one.peaks, stage.peaks, strict=True)
    ]
    assert all(0 <= extra <= HELD_BY_GLOO for extra in more), more


def _choice(stage):
    return stage.rank, stage.layers, stage.seconds, stage.least


@pytest.mark.slow
def test_what_only_measurement_tells_is_refused(ranks):
    (text,) = ranks(
        1,
        jobs.refused,
        jobs.FEATURE + " --adaptive-recompute-device-swap",
        setup=SETUP,
        backend=None,
    )
    assert "speed of copies to the host" in text
    (text,) = ranks(1, jobs.refused, "", setup=SETUP, backend=None)
    assert "--adaptive-recompute-device-size" in text


@pytest.mark.weekly
@pytest.mark.slow
def test_the_command_writes_the_file(ranks, tmp_path):
    from tests.support import commands_job
    from tests.support.trainer_job import command

    own = ["plan", "--plan-activations", "4.29MiB", "--out", str(tmp_path), "--json", "--"]
    words = [*own, *command([*SMALL_MODEL.split(), *jobs.FLAGS.split(), "--nproc", "2"])]
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    ((status, text, errors),) = ranks(1, commands_job.run, words, **options)
    assert status == 0, errors
    found = json.loads(text[text.index("{") :])
    assert found["fits"]
    assert json.loads((tmp_path / "activations.json").read_text()) == found["activation_plan"]
    assert found["flags"] == ["--activation-plan", str(tmp_path / "activations.json")]
