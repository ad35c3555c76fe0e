"""Schedules that recompute train as Megatron's interleaved schedule without recomputation does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.simulate import simulate
from tests.memory import memory_ranks
from tests.pipeline.schedule.recompute_ranks import Case, Found, compare
from tests.pipeline.schedule.step_ranks import Layout

SETUP = "tests.support.warm"
BUBBLE, ADVANCE = {"recompute": "bubble"}, {"recompute": "advance"}


def check(ranks: list[dict[str, Found]], planned: dict[str, tuple[int, ...]]) -> None:
    """Bits, and second runs of layers.

    Args:
        ranks: what each rank found.
        planned: for each case the recomputed chunks of each pipeline rank.
    """
    for name, expected in planned.items():
        found = [rank[name] for rank in ranks]
        assert [case.differ for case in found] == [[]] * len(found), name
        assert tuple(case.planned for case in found) == expected, name
        for case in found:
            assert case.early == case.figures.reruns == case.planned * case.layers, name


def check_bytes(ranks: list[Found]) -> None:
    """What layers hold at the fullest moment is what the chunks of the plan hold, on every rank.

    A chunk holds what layers that are recomputed drop and keep, by the figures of the engine.
    """
    figures, layers, plan = ranks[0].figures, ranks[0].layers, ranks[0].plan
    dropped, kept = (x / figures.calls * layers for x in (figures.dropped, figures.kept))
    peaks = simulate(plan, Costs(input_share=kept / (kept + dropped))).peak_memory
    for rank, peak in zip(ranks, peaks, strict=True):
        planned = peak * plan.placement.chunks * (kept + dropped)
        assert rank.nbytes == pytest.approx(planned, rel=0.05)


TWO = Layout(pipeline=2, chunks=2)
EXPERTS = {
    "num_layers": 4,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


def test_two_ranks_train_to_the_same_bits(ranks):
    cases = {
        "bubble": Case(TWO, BUBBLE, 8),
        "advance": Case(replace(TWO, spec="local"), ADVANCE, 4),
        "one layer": Case(TWO, ADVANCE, 4, layers=1),
        "split": Case(TWO, {**ADVANCE, "kind": "zb-h1"}, 4),
        "experts": Case(replace(TWO, config=EXPERTS), ADVANCE, 4),
    }
    found = ranks(2, compare, cases, setup=SETUP, timeout=60)
    check(found, {"bubble": (3, 0), **dict.fromkeys(list(cases)[1:], (8, 4))})
    for name in ("bubble", "advance"):
        check_bytes([rank[name] for rank in found])


VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
FLAGS = {
    "bubble": "--recompute-in-bubble",
    "advance": "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
    "--recompute-in-advance",
}
TRAINED = {
    "dense": (2, f"--bf16 {DROPOUT} --overlap-grad-reduce"),
}


@pytest.mark.parametrize("case", TRAINED)
def test_our_trainer_ends_with_the_same_parameters(ranks, case):
    world, layout = TRAINED[case]

    def train(flags: str) -> Any:
        given = f"{VPP} {layout} {flags}".split()
        return ranks(world, memory_ranks.trained, given, setup=SETUP, backend=None, timeout=240)

    plain = train("")
    for flags in FLAGS.values():
        ours = train(flags)
        assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
        print([rank["reruns"] for rank in ours])
    assert 0
