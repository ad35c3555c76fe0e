"""Collectives of a recording: what every rank got is what was given, and what is said if not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed.cli.main import main
from mindspeed.compare import collective_walk
from mindspeed.compare.collectives import CollectiveRecorder, RecordedMessage, expected_bytes
from mindspeed.compare.digest import SKETCHES, WIDTH
from mindspeed.compare.names import NO_MICRO_BATCH, Name
from mindspeed.errors import DataError
from tests.compare.faults import ATTENTION, FC2
from tests.compare.job import Runs
from tests.compare.layouts import JOBS, RECOMPUTED, SP2, TP2
from tests.support.lazy import needs

needs("megatron.core")

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "recv", "send")
DTYPES, ROWS = (torch.float32, torch.bfloat16, torch.int64), (0, 1, 100)
RECORDED = "--record-what activations collectives"
PP2 = "--pipeline-model-parallel-size 2"
RING = "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo"
FC1 = FC2.replace("fc2", "fc1")
EQUAL = {  # flags, some of the calls
    "pipeline, chunks": (
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
        {("send", "step", ""), ("all_reduce", "step", "")},
    ),
    "tensor, sequence": (
        f"{SP2} {RECOMPUTED}",
        {
            ("all_gather", "forward", FC1),
            ("reduce_scatter", "recompute", FC2),
            ("all_gather", "backward", FC2),
            ("reduce_scatter", "backward", FC1),
            ("all_reduce", "forward", "model"),
        },
    ),
    "ring": (RING, {("send", way, ATTENTION) for way in ("forward", "backward")}),
    "ulysses": (
        "--context-parallel-size 2",
        {("all_to_all", way, ATTENTION) for way in ("forward", "backward")},
    ),
    "optimizer": (
        "--use-distributed-optimizer --overlap-grad-reduce",
        {("reduce_scatter", "step", ""), ("all_gather", "step", "")},
    ),
}


@pytest.fixture(scope="module")
def right(runs):
    """A right run of two tensor ranks."""
    return runs.record(2, f"{TP2} {RECORDED}")


def page(capsys, a, b, status):
    assert main(["compare", str(a), str(b)]) == status
    return capsys.readouterr().out


def messages(path):
    """Those of all ranks."""
    return [call.message for own in collective_walk.read(path)[0].values() for call in own]


def every_operation(folder):
    """Call each operation in several dtypes and sizes, and write what was recorded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    recorder = CollectiveRecorder(0, [], lambda: 0)
    generator = torch.Generator().manual_seed(rank)
    with recorder.watching():
        for dtype in DTYPES:
            for rows in ROWS:
                x = (torch.randn(ranks * rows, 130, generator=generator) * 9).to(dtype)
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                    dist.all_reduce(x.clone(), op)
                dist.all_reduce(x.clone(), async_op=True).wait()
                dist.all_gather([torch.empty_like(x) for _ in range(ranks)], x)
                part = x.new_empty(rows, 130)
                dist.reduce_scatter_tensor(part, x)
                dist.all_gather_into_tensor(x, part)
                dist.reduce_scatter(part, list(x.chunk(ranks)) if rows else [x] * ranks)
                dist.broadcast(x, ranks - 1)
                dist.all_to_all_single(torch.empty_like(x), x)
                splits = [rows * (1 + (rank == to)) for to in range(ranks)]
                own = torch.randn(sum(splits), 130, generator=generator).to(dtype)
                dist.all_to_all_single(torch.empty_like(own), own, splits, splits)
                to, of = (rank + 1) % ranks, (rank - 1) % ranks
                pair = [dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, own[: len(x)], of)]
                for work in dist.batch_isend_irecv(pair):
                    work.wait()
        dist.barrier()
    recorder.write(Path(folder), rank)


@pytest.mark.slow
def test_every_operation_is_right_in_every_dtype(rank_pool, tmp_path):
    rank_pool.run(3, every_operation, str(tmp_path))
    calls = collective_walk.read(tmp_path)[0]
    found = collective_walk.compare(tmp_path, tmp_path, True)
    times = 2 * len(DTYPES) * len(ROWS)  # the run is A and B
    assert not found.wrong and found.unchecked == {"all_reduce: reduction MAX": times}
    assert all(call.message.sent or call.message.got for own in calls.values() for call in own[:-1])
    assert found.checked == times * (2 + 1 + 1 + 1 + 1 + 1 + 2 + 3)
    path = tmp_path / "step-000000" / "collectives-00001.jsonl"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(DataError, match="damaged, record again"):
        collective_walk.read(tmp_path)
    far = torch.zeros(1, WIDTH, dtype=torch.float64)
    far[:, :SKETCHES] = 1e5
    for number, call in enumerate(calls[1]):  # one part of what rank 1 got, wrong in turn
        if call.message.got and call.message.bytes and call.message.reduction != "MAX":
            at = call.message.got[-1]
            changed = call.bits.index_add(0, torch.tensor([at]), torch.tensor([1]))
            sums = call.sums.index_add(0, torch.tensor([at]), far)
            broken = {**calls, 1: [*calls[1]]}
            broken[1][number] = replace(call, bits=changed, sums=sums)
            [one] = collective_walk.wrong("B", 0, broken).wrong
            assert "what rank 1 got is not what rank" in one.text and one.message.op in OPS


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layout", EQUAL)
def test_a_right_run_has_no_finding(runs, layout):
    flags, expected = EQUAL[layout]
    path = runs.record(2, f"{flags} {RECORDED}")
    found = collective_walk.compare(path, path, True)
    assert expected <= {(one.op, one.when, one.module) for one in messages(path)}
    assert not found.wrong and found.only is None
    assert found.unchecked.keys() <= {"all_reduce: reduction MAX"}
    written = sum(one.stat().st_size for one in path.glob("step-*/collectives-00000.*"))
    assert written < 1.1 * expected_bytes(4, 2, 2)
    assert found.checked + found.unchecked.total() == len(messages(path))


@pytest.mark.slow
def test_experts_have_no_finding(rank_pool, tmp_path):
    experts = Runs(rank_pool.run, tmp_path, JOBS["experts"].flags)
    path = experts.record(2, f"--expert-model-parallel-size 2 {RECORDED} --record-micro-batches 0")
    found = collective_walk.compare(path, path, True)
    assert any(one.op == "all_to_all" for one in messages(path)) and not found.wrong
    assert not found.unchecked and found.checked == len(messages(path))


def test_a_receiver_that_rolls_its_rows_is_named(runs, capsys):
    a, b = (runs.record(2, f"{PP2} {RECORDED}", fault) for fault in ("", "received rows rolled"))
    text = page(capsys, a, b, 1)
    wrong = r"message from rank 0 to rank 1, number 0, outside of the model: "
    wrong += "what rank 1 got is not what rank 0 gave"
    assert re.search(rf"FIRST DIFFERENCE.*\n.*the collective before it: {wrong}", text), text
    assert f"collective of B: {wrong}" in text


def test_one_bit_of_a_sum_on_one_rank_is_named(runs, right, capsys):
    text = page(capsys, right, runs.record(2, f"{TP2} {RECORDED}", "one bit of a sum"), 1)
    wrong = rf"all_reduce of ranks 0, 1, number \d+, in forward of {FC2}, micro-batch 0: "
    wrong += "what rank 1 got is not what ranks 0, 1 gave"
    assert re.search(rf"the collective before it: {wrong}", text), text
    assert re.search(rf"collective of B: {wrong}", text)
    assert "collective of A" not in text


@pytest.mark.parametrize("reduction", ["SUM", "MAX"])
@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ((7, 7, 7), ""),
        ((7, 7, 8), "rank 2 got other bits than the rest of ranks 0, 1, 2"),
        ((7, 8), "ranks 0, 1 got different bits"),
    ],
)
def test_ranks_get_the_same_bits_of_a_reduction(reduction, bits, text):
    """A difference below the rounding of a sum, and of what is no sum."""
    ranks = tuple(range(len(bits)))
    message = RecordedMessage(
        "all_reduce", "0", ranks, 0, (), 8, "float32", reduction, "forward", 0, FC2, [0], [1]
    )
    sums = torch.zeros(2, WIDTH, dtype=torch.float64)
    calls = {
        rank: collective_walk.DigestedMessage(message, torch.tensor([0, own]), sums)
        for rank, own in zip(ranks, bits, strict=True)
    }
    _, found = collective_walk._wrong(calls)
    assert found == text


def test_a_collective_that_only_one_run_calls_is_named(runs, right, capsys):
    text = page(capsys, right, runs.record(2, f"{TP2} {RECORDED}", "all-reduce left out"), 1)
    only = (
        rf"all_reduce of ranks 0, 1, number \d+, in forward of {FC2}, micro-batch 0: only A calls"
    )
    assert re.search(rf"the collective before it: {only}", text), text
    assert re.search(rf"collectives differ first in {only}", text)


BEFORE = Name(0, 0, "forward", FC2, "output")


@pytest.mark.parametrize(
    ("place", "name", "before", "does"),
    [
        (("forward", 0, FC2), BEFORE, "", True),
        (("forward", 0, FC2), BEFORE._replace(module="decoder.layers.2"), "", True),
        (("forward", 0, FC2), BEFORE._replace(module="decoder.layers.3"), FC2, True),
        (("forward", 0, FC2), BEFORE._replace(module="decoder.layers.20"), "", False),
        (("forward", 1, FC2), BEFORE, "", False),
        (("recompute", 0, FC2), BEFORE, "", False),
        (("backward", 0, FC2), BEFORE, "", False),
        (("step", NO_MICRO_BATCH, ""), BEFORE, "", False),
        (("step", NO_MICRO_BATCH, ""), BEFORE._replace(when="end"), "", True),
        (("backward", NO_MICRO_BATCH, ""), BEFORE._replace(when="end"), "", True),
    ],
)
def test_which_collective_explains_a_difference(place, name, before, does):
    message = RecordedMessage("all_reduce", "0", (0, 1), 3, (), 8, "float32", "SUM", *place)
    finding = collective_walk.CollectiveFinding("B", 0, message, "wrong")
    assert finding.explains(name, before) == does
    assert not finding.explains(name._replace(step=1), before)


@pytest.mark.slow
def test_a_wrong_collective_counts_where_no_tensor_differs(runs, capsys):
    kinds = "--record-what weights collectives"
    a, b = (runs.record(2, f"{TP2} {kinds}", fault) for fault in ("", "one bit of a sum"))
    text = page(capsys, a, b, 1)
    assert "EQUAL within rounding" in text and f"in forward of {FC2}, micro-batch 0: what" in text
