"""Experts with replicas whose weights are gathered while layers compute train like one rank.

Two of four ranks hold the same experts, so the distributed optimizer divides their weights, and
``--overlap-param-gather`` gathers them just before they are used. Whoever uses them earlier trains
on those of the step before.
"""

from __future__ import annotations

import pytest

from tests.training.one_rank import assert_same_training
from tests.training.test_layouts import MOE

REPLICAS = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--expert-model-parallel-size 2"
)
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
GATED = f"{SHARED} --moe-shared-expert-gate"
OVERLAP = "--moe-permutation-async-comm --moe-alltoall-overlap-comm"
ROWS = {
    "hot experts": (MOE, "--balanced-moe-experts --balanced-moe-hot-expert-num 1"),
    "overlap": (GATED, OVERLAP),
    "all-gather": (
        SHARED,
        "--moe-token-dispatcher-type allgather --moe-permutation-async-comm "
        "--moe-allgather-overlap-comm",
    ),
    "zero memory": (SHARED, f"{OVERLAP} --moe-zero-memory level1"),
    "one by one": (MOE, "--use-pipe-experts"),
    "chunks": (MOE, "--ampipe-degree 2"),
    "once to each rank": (MOE, "--moe-alltoall-exchange dedup"),
}


@pytest.mark.weekly_cases("chunks", "overlap", "once to each rank", "zero memory", "one by one")
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_losses_are_those_of_one_rank(row, one_rank):
    model, flags = ROWS[row]
    reference = one_rank(model)
    assert_same_training(reference.train(4, f"{REPLICAS} {flags}"), reference.records)
