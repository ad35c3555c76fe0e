"""Training on pairs of answers, counted: the reference model and the step before training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.real_and_fake import SETUP, _args, compare, fake

_PP = "--pipeline-model-parallel-size 2 --bf16 --is-instruction-dataset --dry-run ~--mock-data "
_CP = "--context-parallel-size 2 --bf16 --is-instruction-dataset --dry-run ~--mock-data "
_LORA = "--lora-r 4 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 "
_PREFERENCE = "--objective preference "
CASES = {
    "frozen copy": (4, _PP + _PREFERENCE),
    "adapters off": (4, _CP + _PREFERENCE + _LORA),
    "kto, packed": (2, _CP + _PREFERENCE + "--loss-type kto --pack-sequences"),
    "orpo": (2, _CP + _PREFERENCE + "--loss-type orpo"),
    "reward": (4, _PP + "--objective reward --use-distributed-optimizer"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fake_equals_real(ranks, name):
    """On the last stage."""
    world, flags = CASES[name]
    assert compare(ranks, world, flags, [world - 1]) == {}


@pytest.mark.slow
def test_a_frozen_copy_adds_its_weights_and_adapters_switched_off_nothing(ranks):
    jobs = ["", "--loss-type orpo", _LORA, _LORA + "--precompute-reference"]
    found = ranks(1, each, [_CP + _PREFERENCE + job for job in jobs], setup=SETUP, backend=None)
    copy, without, adapters, known = found[0]
    frequencies = 16  # of the rotary embedding
    added = copy["static"]["weights"] - without["static"]["weights"]
    assert added == 2 * without["parameters"] + frequencies
    assert adapters["static"] == known["static"]
    assert copy["FLOPs"] > without["FLOPs"] and adapters["FLOPs"] > known["FLOPs"]


def each(jobs: list[str]) -> list[dict[str, Any]]:
    """Figures of the first rank of several jobs, of which nothing runs."""
    found = [fake(flags, 2, [0], 1.0)[0] for flags in jobs]
    return [
        {"parameters": one["parameters"], "static": one["static"]} | {"FLOPs": one["FLOPs"].total}
        for one in found
    ]


@pytest.mark.slow
def test_a_job_of_pairs_is_not_composed_and_a_reference_pass_not_timed(ranks):
    said = ranks(1, refusals, _CP + _PREFERENCE, setup=SETUP, backend=None)[0]
    assert said[0] == "training on pairs of answers (--objective preference)"
    assert "the reference model runs before the schedule" in said[1]
    said = ranks(1, refusals, _CP + "--objective reward", setup=SETUP, backend=None)[0]
    assert said == ["training on pairs of answers (--objective reward)"]


def refusals(flags: str) -> list[str]:
    """Why a job is not composed of small runs, and a time of it is not predicted."""
    from mindspeed.errors import PlanError
    from mindspeed.planner.shape import shape_of
    from mindspeed.planner.time.whole_ranks import predict_whole

    args = _args(flags, 2)
    found = [shape_of(args).unspliceable]
    if args.objective == "preference":
        with pytest.raises(PlanError) as raised:
            predict_whole(args, None, None)
        found.append(str(raised.value))
    return found
