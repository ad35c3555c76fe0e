"""The bubble of the dry run is that of the simulated schedule."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.layout import evenly, parse_matrix, stage_layers
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from mindspeed.testing import RankError
from mindspeed.training import pipeline_figures
from mindspeed.training.pipeline_figures import figures_of
from tests.support.trainer_job import SETUP
from tests.training.matrix_job import figures_text, refusal_of_bytes

KINDS = {
    "1f1b": 1,
    "interleaved": 2,
    "zb-h1": 1,
    "nanopipe": 2,
    "zb-v": 2,
    "dualpipev": 2,
    "aiao": 2,
}


def percent(fraction: float) -> float:
    return round(100 * fraction, 1)


@pytest.mark.parametrize(
    ("p", "v", "m", "bubble", "in_flight"),
    [(4, 1, 16, 15.8, 4), (4, 2, 8, 15.8, 5.5), (8, 2, 64, 5.2, 11.5), (4, 4, 64, 1.2, 4.75)],
)
def test_megatrons_schedules_have_the_published_bubble_and_memory(p, v, m, bubble, in_flight):
    found = figures_of(ScheduleRequest(), p, v, m)
    assert percent(found.bubble) == bubble == percent((p - 1) / (v * m + p - 1))
    peak = simulate(build_plan(ScheduleRequest(), p, v, m)).peak_memory[0]
    assert peak == in_flight == p + ((p - 1) / v if v > 1 else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_step_continues_two_short_ones(kind, monkeypatch):
    request, chunks = ScheduleRequest(kind=kind), KINDS[kind]
    exact = figures_of(request, 4, chunks, 203 if chunks == 1 else 204)
    monkeypatch.setattr(pipeline_figures, "MOST_ACTIONS", 100)
    found = figures_of(request, 4, chunks, 203 if chunks == 1 else 204)
    assert found.bubble == pytest.approx(exact.bubble, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_step_takes_no_time(kind, monkeypatch):
    made = []

    def build(request, p, v, m):
        made.append(2 * p * v * m)
        return build_plan(request, p, v, m)

    monkeypatch.setattr(pipeline_figures, "build_plan", build)
    found = figures_of(ScheduleRequest(kind=kind), 8, KINDS[kind], 2**31 - 8)
    assert 0 < found.bubble < 1e-7
    assert sum(made) <= 10_000


def test_a_pipeline_with_millions_of_actions_has_megatrons_formula():
    made = figures_of(ScheduleRequest(), 512, 4, 2**31 - 512)
    assert made.bubble == pytest.approx(511 / (4 * (2**31 - 512) + 511))


def test_stages_with_different_layers_wait_for_the_slowest():
    layers = stage_layers(parse_matrix("[[3],[1]]"))
    shares = tuple(count / 2 for count in layers)
    found = figures_of(ScheduleRequest(), 2, 1, 8, shares)
    even = figures_of(ScheduleRequest(), 2, 1, 8)
    assert percent(even.bubble) == 11.1
    # The rank with 3 layers never waits: 8 times 3 slots of 1.5, where the mean rank needs 24.
    assert found.bubble == pytest.approx(1 - 24 / (8 * 3 * 1.5))
    assert stage_layers(evenly(4, 2)) == (2, 2)


@pytest.mark.slow
def test_dry_run_prints_the_figures_of_the_schedule_of_its_flags(ranks):
    pipeline = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size"
    virtual = "--num-layers-per-virtual-pipeline-stage 1"
    in_bubble = "(interleaved, recomputation in bubble)"
    cases = {
        f"{pipeline} 8": "11.1 % (1f1b)",
        f"{pipeline} 8 --num-layer-list 1,3": "36.0 % (1f1b)",
        f"{pipeline} 8 --pipeline-schedule zb-h1": "4.0 % (zb-h1)",
        f"{pipeline} 8 {virtual} --use-nanopipe": "2.0 % (nanopipe)",
        f"{pipeline} 8 --optimized-pipeline --manual-mbs 1,1,1,1,1,1,1,1": "11.1 % (1f1b)",
        f"{pipeline} 8 {virtual} --fold-mode aiao --overlap-grad-reduce": "5.9 % (aiao)",
        f"{pipeline} 8 {virtual} --recompute-in-bubble": f"7.7 % {in_bubble}",
        f"{pipeline} 8 --schedules-method dualpipev": "5.9 % (dualpipev)",
        f"{pipeline} 8 {virtual}": "5.9 % (interleaved)",
        f"{pipeline} 2147483646 {virtual}": "0.0 % (interleaved)",
    }
    for flags, expected in cases.items():
        (text,) = ranks(1, figures_text, flags.split(), setup=SETUP, backend=None, timeout=60)
        (bubble,) = [line for line in text.splitlines() if "pipeline bubble" in line]
        assert bubble.split(maxsplit=2)[2] == expected, flags


FLAG = "--microbatch-group-size-per-virtual-pipeline-stage"


def check_of_four_stages(samples, group):
    """The check of four stages with two chunks each, one rank of data, one sample at a time."""
    args = Namespace(
        **{"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
        **{"microbatch_group_size_per_vp_stage": group, "global_batch_size": samples},
        **{"micro_batch_size": 1, "data_parallel_size": 1, "rampup_batch_size": None},
        **{"world_size": 4, "tensor_model_parallel_size": 1, "context_parallel_size": 1},
        **{"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None},
        use_tp_pp_dp_mapping=False,
    )
    pipeline_figures.check_interleaved(args)


@pytest.mark.parametrize(("samples", "group"), [(12, None), (4, 4), (10, 5), (9, 5)])
def test_groups_that_fill_the_pipeline_are_accepted(samples, group, ranks):
    ranks(1, check_of_four_stages, samples, group, setup=SETUP, backend=None)


@pytest.mark.parametrize(
    ("samples", "group", "advice"),
    [
        (10, None, f"give a multiple of 4 samples, or {FLAG} 5"),
        (2, None, "give a multiple of 4 samples"),
        (8, 3, f"give a multiple of 4 samples, or {FLAG} 4"),
        (8, 16, f"give a multiple of 16 samples, or {FLAG} 4"),
    ],
)
def test_a_small_group_is_refused_before_megatron_stops(samples, group, advice, ranks):
    with pytest.raises(RankError) as raised:
        ranks(1, check_of_four_stages, samples, group, setup=SETUP, backend=None)
    error = raised.value.original
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"--global-batch-size {samples} has {samples} micro-batches")
    assert str(error).endswith(advice)


def test_bytes_that_take_minutes_are_left_to_the_planner(ranks):
    (said,) = ranks(1, refusal_of_bytes, [], setup=SETUP, backend=None, timeout=120)
    assert "mindspeed plan --check -- with these flags counts them" in said
