"""Loads of experts in the log: the rows that were dispatched, and no collective more."""

from __future__ import annotations

import json
import math

import pytest

from mindspeed.moe.load.megatron import entropy, figures
from tests.moe.load_job import train
from tests.support.trainer_job import SETUP, metrics
from tests.training.test_layouts import MOE


def test_figures_of_a_load():
    found = figures([30, 10, 10, 14], chosen=80, ranks=2, node=1)
    assert (found.experts, found.ranks, found.nodes) == (30 / 16, 40 / 32, 40 / 32)
    assert found.dropped == pytest.approx(0.2)
    shares = [30 / 64, 10 / 64, 10 / 64, 14 / 64]
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4))
    assert figures([1, 3, 1, 3], chosen=8, ranks=2, place=[0, 0, 1, 1]).ranks == 1
    assert entropy([5, 5, 5]) == pytest.approx(1)
    assert entropy([7, 0]) == 0


BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
BALANCE = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
EP, TWO_STAGES = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "bias": (2, f"{EP} {BIAS} --moe-alltoall-overlap-comm", "all ranks"),
    "balance, stages": (4, f"{EP} {TWO_STAGES} {BALANCE} {RECOMPUTED}", "all ranks"),
    "neither, a program": (
        4,
        f"{EP} --moe-alltoall-overlap-comm --moe-exchange-interval 3",
        "one expert group",
    ),
    "neither, dropped": (2, f"{EP} --moe-expert-capacity-factor 0.5", "one rank's tokens"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_of_the_log_are_those_dispatched_without_a_collective_more(case, ranks, tmp_path):
    world, flags, over = CASES[case]
    more = f"--train-iters 4 --log-interval 2 --metrics-file {tmp_path / 'metrics.jsonl'}"
    given = f"{MOE} {flags} {more}".split()
    logged = [*given, "--moe-log-load", str(tmp_path / "load")]
    plain = ranks(world, train, given, setup=SETUP, backend=None, timeout=240)
    found = ranks(world, train, logged, setup=SETUP, backend=None, timeout=240)
    assert [one["calls"] for one in found] == [one["calls"] for one in plain]
    assert [one["rows"] for one in found] == [one["rows"] for one in plain]

    records = {}
    for path in (tmp_path / "load").glob("stage-*.jsonl"):
        records[path.stem] = list(map(json.loads, path.read_text().splitlines()))
    assert {record["over"] for stage in records.values() for record in stage} == {over}
    sums: dict[int, list[int]] = {}
    for stage in records.values():
        assert [record["iteration"] for record in stage] == [2, 4]
        for layer in (layer for record in stage for layer in record["layers"]):
            had = sums.get(layer["layer"], [0] * 4)
            sums[layer["layer"]] = [a + b for a, b in zip(had, layer["tokens"], strict=True)]
    ranks_of = {"all ranks": world, "one expert group": 2, "one rank's tokens": 1}
    summed = found[: ranks_of[over]]
    expected = {}
    for layer in (1, 2, 3, 4):
        of_ranks = [one["rows"][layer] for one in summed if layer in one["rows"]]
        expected[layer] = [sum(column) for column in zip(*of_ranks, strict=True)]
    assert sums == expected
    last = metrics(tmp_path / "metrics.jsonl")[-1]
    final = [layer for stage in records.values() for layer in stage[-1]["layers"]]
    if over == "all ranks" and len(records) == 1:
        assert last["expert_load"] == max(layer["experts"] for layer in final)
        assert 0 < last["expert_bias_change"] <= 2.001e-3  # 1e-3 a step
        assert last["expert_bias"] == max(layer["bias"] for layer in final)
    assert last["expert_load"] >= 1
    assert ("expert_dropped" in last) == ("dropped" in case)
