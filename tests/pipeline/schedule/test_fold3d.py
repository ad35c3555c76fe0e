"""Fold3D: reductions start between backwards, and what that hides."""

from __future__ import annotations

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.pipeline.schedule.simulate import simulate
from tests.pipeline.schedule.fold3d_ranks import gathers, run
from tests.pipeline.schedule.step_ranks import Layout

SETUP = "tests.support.warm"


def figures(p, m, v, share, **request):
    """Makespan, exposed reduction and peak memory; the reduction takes ``share`` of the sum."""
    costs = Costs(reduction=3 * m * share / (1 - share))
    price = simulate(build_plan(ScheduleRequest(**request), p, v, m), costs)
    return price.makespan, price.exposed_reduction, max(price.peak_memory)


@pytest.mark.parametrize(
    ("p", "m", "v", "share", "exposed", "gain"),
    [
        (8, 64, 4, 0.44, (138.9, 54.9), 1.33),
        (8, 64, 8, 0.44, (136.9, 38.9), 1.42),
        (4, 16, 4, 0.44, (31.7, 13.7), 1.28),
        (4, 16, 8, 0.44, (30.7, 9.7), 1.36),
        (8, 64, 4, 0.1, (9.3, 5.3), 1.02),
        (4, 16, 4, 0.1, (1.3, 1.3), 1.0),
    ],
)
def test_all_in_all_out_hides_the_reduction_of_all_chunks_but_one(p, m, v, share, exposed, gain):
    fifo = figures(p, m, v, share, kind="interleaved")
    aiao = figures(p, m, v, share, kind="aiao")
    strict = figures(p, m, v, share, kind="aiao", strict=True)
    assert (round(fifo[1], 1), round(aiao[1], 1)) == exposed
    assert round(sum(fifo[:2]) / sum(aiao[:2]), 2) == gain
    assert strict[:2] == pytest.approx(aiao[:2])
    assert aiao[2] == (2 * (p - 1) + (v - 1) * m + 1) / v < strict[2] == m


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_reductions_start_between_backwards(ranks, sharded):
    m, ddp = 4, {"overlap_grad_reduce": True, "use_distributed_optimizer": sharded}
    layout = Layout(pipeline=2, chunks=2, ddp=ddp)
    requests = [{"kind": "aiao"}, {"kind": "aiao", "strict": True}, {"kind": "interleaved"}]
    results = ranks(4, run, layout, m, requests, setup=SETUP)
    for aiao, strict, interleaved in results:
        assert aiao["differences"] == strict["differences"] == []
        # The last chunk's reduction runs behind all backwards of the chunk before.
        assert aiao["left"] == strict["left"] == [0, m]
        assert interleaved["left"] == [0, 2]
        assert {one["reductions"] for one in (aiao, strict, interleaved)} == {2}


@pytest.mark.slow
def test_parameters_are_gathered_while_the_chunk_before_computes(ranks):
    m, ddp = 4, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
    ddp |= {"overlap_param_gather": True, "align_param_gather": True}
    layout = Layout(pipeline=2, chunks=4, ddp=ddp)
    for aiao, interleaved in ranks(4, gathers, layout, m, ["aiao", "interleaved"], setup=SETUP):
        assert aiao == [0, 0, m, 2 * m]
        assert interleaved == [0, 0, 2, 4]
