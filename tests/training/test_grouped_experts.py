"""Experts in Megatron's buffers, which reverse their order: few launches, same checkpoints."""

from __future__ import annotations

import pytest

from tests.support.trainer_job import SETUP
from tests.training.launches_job import launches
from tests.training.one_rank import column
from tests.training.test_layouts import MOE

DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHORT = f"{MOE} --num-experts 16 --moe-ffn-hidden-size 512 --seq-length 8"
EXPERTS = f"{DISTRIBUTED} --expert-model-parallel-size 2"


@pytest.mark.weekly_cases("fp32")
@pytest.mark.parametrize(
    "precision", ["", pytest.param("--bf16", marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_one_launch_serves_all_experts_of_a_rank(precision, rank_pool):
    """4 layers, 2 micro-batches, 8 experts: 2 products in each pass, 2 weight gradients."""
    flags = f"{SHORT} {EXPERTS} {precision} --train-iters 1"
    for found in rank_pool.run(2, launches, flags.split(), setup=SETUP, backend=None, timeout=240):
        assert found["grouped_matmul"] == 4 * 2 * (2 + 2)
        assert found["groupmatmul_add"] == 4 * 2 * 2
        assert found["grouped_outer"] == 0
        dense = 2 * (4 * 2 + 1)  # two linears of attention in each layer, and the output layer
        assert found["matmul_add"] == dense


@pytest.mark.weekly_cases("loaded")
@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["saved", "loaded"])
def test_states_of_experts_are_found_without_the_feature(first, one_rank):
    """Megatron's default format holds the states of the optimizer as they lie in memory."""
    reference = one_rank(f"{MOE} --num-experts 8")
    flags = [EXPERTS, f"{EXPERTS} --optimization-level 0"]
    records = reference.resumed((2, 2), tuple(flags if first else flags[::-1]))
    assert column(records, "lm_loss") == pytest.approx(
        column(reference.records, "lm_loss")[2:], rel=1e-6
    )
