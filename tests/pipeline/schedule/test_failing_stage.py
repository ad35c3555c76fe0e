"""A stage that fails in the middle of a step ends all ranks, which wait for messages meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.errors import DataError, NoAnswer
from mindspeed.pipeline.schedule.actions import FORWARD
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.processes import free_port
from mindspeed.testing.ranks import RankError
from mindspeed.training.fail_together import _describe, _Others
from tests.pipeline.schedule import toy_ranks
from tests.pipeline.schedule.step_ranks import Layout, step_without_data
from tests.training import launch_ranks

SETUP = "tests.support.warm"
ROOT = Path(__file__).parents[3]
BODY = """
import os
import torch.distributed as dist
from mindspeed.errors import TrainingError
from mindspeed.pipeline.schedule.channel import PeerToPeer, directions_of
from mindspeed.pipeline.schedule.executor import execute
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from mindspeed.training.fail_together import stop_together
from tests.pipeline.schedule.toy_ranks import ToyWork
import torch

class Failing(ToyWork):
    def forward(self, action, inputs):
        if (action.stage, action.microbatch) == (2, 3):
            raise TrainingError("stage 2, micro-batch 3: out of memory")
        return super().forward(action, inputs)

def main():
    dist.init_process_group("gloo")
    plan = build_plan(ScheduleRequest(kind="zb-h1"), 4, 1, 8)
    directions = directions_of(dist.group.WORLD)
    channels = PeerToPeer(plan, dist.get_rank(), directions, lambda transfer: [torch.zeros(2)])
    execute(plan, dist.get_rank(), Failing(plan), channels)
"""
ERROR = "stage 2, micro-batch 3: out of memory"


def test_the_trainers_ranks_end_with_the_error_of_the_first(ranks, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(f"{BODY}\nwith stop_together('pretrain'):\n    main()\n")
    given = str(script), 4, str(tmp_path), "1"
    ((status, output),) = ranks(1, launch_ranks.run, *given, setup=SETUP, backend=None, timeout=100)
    assert status == 1
    assert f"mindspeed pretrain [rank 2]: {ERROR}" in output
    assert output.count("[rank") == 1


@pytest.mark.slow
def test_ranks_of_another_loop_end_without_a_launcher(tmp_path):
    """The connection of a rank that ends breaks, and with it the waits of its neighbours."""
    script = tmp_path / "rank.py"
    script.write_text(f"{BODY}\nmain()\n")
    env = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "MINDSPEED_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    outputs = [job.communicate(timeout=100)[1] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert f"TrainingError: {ERROR}" in outputs[2]
    assert [ERROR in output for output in outputs] == [False, False, True, False]
    for rank, awaited in ((0, 1), (1, 2), (3, 2)):
        assert f"NoAnswer: pipeline: rank {rank} waits for rank {awaited} to" in outputs[rank]


@pytest.mark.parametrize(("kind", "micro_batch"), [("1f1b", 1), ("zb-h1", 3)])
def test_a_stage_that_hangs_is_named_with_micro_batch_and_rank(ranks, kind, micro_batch):
    plan = build_plan(ScheduleRequest(kind=kind), 3, 1, 4)
    action = next(a for a in plan.rows[1] if (a.op, a.microbatch) == (FORWARD, micro_batch))
    sent = [plan.transfer_of(a) for a in plan.rows[1][: plan.rows[1].index(action)]]
    found = ranks(3, toy_ranks.without_answer, plan, action, setup=SETUP)
    assert found[1] is None
    for rank, said in (
        (0, "gradient of stage 1 for stage 0"),
        (2, "output of stage 1 for stage 2"),
    ):
        needed = [plan.message_to(one) for one in plan.rows[rank]]
        first = next(one for one in needed if one and one.source == 1 and one not in sent)
        assert found[rank].startswith(
            f"pipeline: rank {rank} waits for rank 1 to send the {said}, micro-batch "
            f"{first.microbatch}: Timed out waiting 500ms"
        )


def test_the_wait_at_the_end_of_all_waits_is_named():
    """A stage that waits itself is no cause, whichever rank tells it; nor is a collective."""

    def wait(rank, awaited):
        said = f"rank {rank} waits for rank {awaited} to send ...: Timed out waiting 600000ms"
        return NoAnswer(said, rank, awaited)

    def told(error, silent, *waits):
        return _describe("pretrain", error.rank, error, _Others(silent, waits))

    waits = [wait(3, 2), wait(2, 1), wait(0, 1)]
    collective = RuntimeError("Timed out waiting 600000ms for send operation")
    for error in waits:
        line = told(error, [], *waits)
        assert line.startswith(f"mindspeed pretrain [rank {error.rank}]: {waits[1]}; ")
        assert line.endswith("rank 1 is alive and sends nothing")
    line = _describe("pretrain", 4, collective, _Others([1], waits))
    assert line.startswith(f"mindspeed pretrain [rank 4]: {waits[1]}; rank 1 does not answer: the")
    assert "they wait for each other" in told(waits[0], [], *waits, wait(1, 3))
    broken = NoAnswer("rank 3 waits for rank 2 to send ...: Connection closed by peer", 3, 2)
    assert _describe("pretrain", 3, broken).endswith("by peer; rank 2 was killed or crashed")


def test_a_data_iterator_that_ends_early_is_named(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2, step_without_data, Layout(pipeline=2, num_layers=2), setup=SETUP)
    assert isinstance(caught.value.original, DataError)
    assert str(caught.value.original) == (
        "the data iterator of pipeline stage 0 (rank 0 of the pipeline) ended at micro-batch 2; "
        "the step has 4"
    )
