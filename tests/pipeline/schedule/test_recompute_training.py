"""Schedules that recompute train as Megatron's interleaved schedule without recomputation does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.simulate import simulate
from tests.memory import memory_ranks
from tests.memory.test_training import MOE
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
SMALL = replace(TWO, num_layers=4)
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


@pytest.mark.slow
def test_two_ranks_train_to_the_same_bits(ranks):
    cases = {
        "bubble": Case(SMALL, BUBBLE, 8),
        "advance": Case(replace(SMALL, spec="local"), ADVANCE, 4),
        "one of two layers": Case(TWO, ADVANCE, 4, layers=1),
        "split": Case(SMALL, {**ADVANCE, "kind": "zb-h1"}, 4),
        "experts": Case(replace(TWO, config=EXPERTS), ADVANCE, 4),
    }
    found = ranks(2, compare, cases, setup=SETUP, timeout=60)
    check(found, {"bubble": (3, 0), **dict.fromkeys(list(cases)[1:], (8, 4))})
    for name in ("bubble", "advance"):
        check_bytes([rank[name] for rank in found])


FOUR = Layout(pipeline=4, chunks=2)
OVERLAP = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}


@pytest.mark.slow
def test_four_ranks_train_to_the_same_bits(ranks):
    """8 chunks are stored instead of 11 on the first of 4 ranks."""
    cases = {
        "bubble": Case(FOUR, BUBBLE, 16),
        "advance": Case(FOUR, ADVANCE, 8),
        "limit": Case(replace(FOUR, spec="local"), {**BUBBLE, "memory_limit": 3.5}, 8),
    }
    found = ranks(4, compare, cases, setup=SETUP, timeout=120)
    planned = {"bubble": (6, 3, 0, 0), "advance": (16, 16, 16, 8), "limit": (4, 3, 0, 0)}
    check(found, planned)
    for name in cases:
        check_bytes([rank[name] for rank in found])
    assert simulate(found[0]["bubble"].plan).peak_chunks == (8, 8, 7, 5)


COMMUNICATING = {
    "tensor": Case(replace(SMALL, tensor=2), BUBBLE, 8),
    "context": Case(replace(SMALL, context=2), ADVANCE, 4),
    "data, local spec": Case(replace(SMALL, ddp=OVERLAP, spec="local"), ADVANCE, 4),
}
OTHER_SPEC = {
    "tensor, local spec": Case(replace(SMALL, tensor=2, spec="local"), ADVANCE, 4),
    "data": Case(replace(SMALL, ddp=OVERLAP), BUBBLE, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(COMMUNICATING, id="each"),
        pytest.param(OTHER_SPEC, id="other spec", marks=pytest.mark.weekly),
    ],
)
def test_recomputation_communicates_as_the_first_run_did(ranks, cases):
    """Two stages on each pair of ranks, by tensor, context and data parallelism."""
    found = ranks(4, compare, cases, setup=SETUP, timeout=240)
    bubble, advance = (3, 3, 0, 0), (8, 8, 4, 4)
    check(found, {name: bubble if case.m == 8 else advance for name, case in cases.items()})


STAGES = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--hidden-dropout 0.1 --attention-dropout 0.1"
)
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
EXPERT_PARALLEL = (
    "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    f"--global-batch-size 8 --expert-model-parallel-size 2 {MOE}"
)


def train(ranks: Any, world: int, flags: str) -> tuple[list[Any], int]:
    """The parameters of all ranks after three steps, and second runs of layers on the first."""
    given = f"{STAGES} {flags}".split()
    found = ranks(world, memory_ranks.trained, given, setup=SETUP, backend=None, timeout=240)
    return [rank["digest"] for rank in found], found[0]["reruns"]


@pytest.mark.weekly
@pytest.mark.slow
def test_our_trainer_ends_with_the_same_parameters(ranks, tmp_path):
    """Also with a schedule that recomputes read from a file."""
    parameters, _ = train(ranks, 2, "")
    file = tmp_path / "plan.csv"
    bubble = f"--recompute-in-bubble --pipeline-schedule-dump {file}"
    assert train(ranks, 2, bubble) == (parameters, 3)
    assert train(ranks, 2, f"--pipeline-schedule {file}") == (parameters, 3)
    assert train(ranks, 2, f"--recompute-in-advance {BLOCK}") == (parameters, 24)


PER_RANK = f"--recompute-in-advance {BLOCK} --enable-recompute-layers-per-pp-rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "count"),
    [
        pytest.param("--recompute-in-bubble", 3, id="bubble", marks=pytest.mark.weekly),
        pytest.param(PER_RANK, 12, id="layers counted per rank"),
    ],
)
def test_our_trainer_with_experts_and_data_parallelism(ranks, flags, count):
    parameters, _ = train(ranks, 4, EXPERT_PARALLEL)
    assert train(ranks, 4, f"{EXPERT_PARALLEL} {flags}") == (parameters, count)


@pytest.mark.weekly_cases("split backwards")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags", "count"),
    [
        ("", "--recompute-in-bubble --recompute-norm --recompute-activation-function", 66),
        ("", f"--recompute-in-advance {BLOCK} --use-nanopipe", 24),
        ("--variable-seq-lengths --mtp-num-layers 1", "--recompute-in-bubble", 3),
    ],
    ids=["sites of stored layers", "split backwards", "variable lengths"],
)
def test_our_trainer_with_other_features(ranks, layout, flags, count):
    parameters, _ = train(ranks, 2, layout)
    assert train(ranks, 2, f"{layout} {flags}") == (parameters, count)
