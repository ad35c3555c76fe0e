"""A stage that fails in the middle of a step ends all ranks, which wait for messages meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed.errors import DataError
from mindspeed.testing.processes import free_port
from mindspeed.testing.ranks import RankError
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
    started = time.monotonic()
    given = str(script), 4, str(tmp_path), "1"
    ((status, output),) = ranks(1, launch_ranks.run, *given, setup=SETUP, backend=None, timeout=100)
    assert status == 1
    assert f"mindspeed pretrain [rank 2]: {ERROR}" in output
    assert output.count("[rank") == 1
    assert time.monotonic() - started < 30


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
    started, outputs = time.monotonic(), [job.communicate(timeout=100)[1] for job in jobs]
    assert all(job.returncode for job in jobs)
    assert f"TrainingError: {ERROR}" in outputs[2]
    assert [ERROR in output for output in outputs] == [False, False, True, False]
    assert time.monotonic() - started < 60


def test_a_data_iterator_that_ends_early_is_named(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2, step_without_data, Layout(pipeline=2, num_layers=2), setup=SETUP)
    assert isinstance(caught.value.original, DataError)
    assert str(caught.value.original) == (
        "the data iterator of pipeline stage 0 (rank 0 of the pipeline) ended at micro-batch 2; "
        "the step has 4"
    )
