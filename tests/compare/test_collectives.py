"""Collectives of a recording: what every rank got is what was given, and what is said if not."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from mindspeed.cli.main import main
from mindspeed.compare import collective_walk
from tests.compare.faults import FC2
from tests.compare.job import Runs
from tests.compare.layouts import JOBS, RECOMPUTED, SP2, TP2
from tests.support.lazy import needs

needs("megatron.core")

RECORDED = "--record-what activations collectives"
PP2 = "--pipeline-model-parallel-size 2"
RING = "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo"
EQUAL = {  # flags, operations that are checked
    "pipeline, stages": (PP2, {"send", "all_reduce"}),
    "tensor, sequence": (f"{SP2} {RECOMPUTED}", {"all_gather", "reduce_scatter", "all_reduce"}),
    "ring": (RING, {"send", "all_reduce"}),
    "ulysses": ("--context-parallel-size 2", {"all_to_all", "all_reduce"}),
    "optimizer": (
        "--use-distributed-optimizer --overlap-grad-reduce",
        {"reduce_scatter", "all_gather"},
    ),
}


def page(capsys, a, b, status):
    assert main(["compare", str(a), str(b)]) == status
    return capsys.readouterr().out


def ops(path):
    calls = collective_walk.read(path)[0]
    return Counter(call.message.op for own in calls.values() for call in own)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layout", EQUAL)
def test_a_right_run_has_no_finding(runs, layout):
    flags, expected = EQUAL[layout]
    path = runs.record(2, f"{flags} {RECORDED}")
    found = collective_walk.compare(path, path, True)
    assert expected <= ops(path).keys()
    assert not found.wrong and found.only is None
    assert found.unchecked.keys() <= {"all_reduce: reduction MAX"} and found.checked > 10


@pytest.mark.slow
def test_experts_have_no_finding(rank_pool, tmp_path):
    experts = Runs(rank_pool.run, tmp_path, JOBS["experts"].flags)
    path = experts.record(2, f"--expert-model-parallel-size 2 {RECORDED} --record-micro-batches 0")
    found = collective_walk.compare(path, path, True)
    assert ops(path)["all_to_all"] and not found.wrong and found.checked > 10
    assert not found.unchecked


def test_a_receiver_that_rolls_its_rows_is_named(runs, capsys):
    a, b = (runs.record(2, f"{PP2} {RECORDED}", fault) for fault in ("", "received rows rolled"))
    text = page(capsys, a, b, 1)
    wrong = r"message from rank 0 to rank 1, number 0, outside of the model: "
    wrong += "what rank 1 got is not what rank 0 gave"
    assert re.search(rf"FIRST DIFFERENCE.*\n.*the collective before it: {wrong}", text), text
    assert f"collective of B: {wrong}" in text


def test_one_bit_of_a_sum_on_one_rank_is_named(runs, capsys):
    a, b = (runs.record(2, f"{TP2} {RECORDED}", fault) for fault in ("", "one bit of a sum"))
    text = page(capsys, a, b, 1)
    wrong = rf"all_reduce of ranks 0, 1, number \d+, in forward of {FC2}, micro-batch 0: "
    wrong += "what rank 1 got is not what ranks 0, 1 gave"
    assert re.search(rf"the collective before it: {wrong}", text), text
    assert re.search(rf"collective of B: {wrong}", text)
    assert "collective of A" not in text


def test_a_collective_that_only_one_run_calls_is_named(runs, capsys):
    a, b = (runs.record(2, f"{TP2} {RECORDED}", fault) for fault in ("", "all-reduce left out"))
    text = page(capsys, a, b, 1)
    only = (
        rf"all_reduce of ranks 0, 1, number \d+, in forward of {FC2}, micro-batch 0: only A calls"
    )
    assert re.search(rf"the collective before it: {only}", text), text
    assert re.search(rf"collectives differ first in {only}", text)
