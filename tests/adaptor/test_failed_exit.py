"""A rank that raises ends the job at once, although a collective of it is in flight."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from multiprocessing import util
from pathlib import Path

import pytest

from mindspeed.journal import Journal
from mindspeed.processes import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def at_exit(monkeypatch):
    """What would run at the end of this process, and what it has begun to end."""
    from mindspeed.adaptor.repairs.scripts import failed_exit

    registered, ended = [], []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(util, "_exit_function", lambda *args: None)
    monkeypatch.setattr(failed_exit, "end_soon", lambda: ended.append(True))
    monkeypatch.delattr(sys, "last_value", raising=False)
    journal = Journal()
    failed_exit.install(journal)
    (end,) = registered
    yield end, ended
    journal.undo()


def test_a_process_that_ends_without_error_is_left_alone(at_exit):
    end, ended = at_exit
    util._exit_function()
    end()
    assert not ended


def test_an_error_of_the_main_thread_is_known(at_exit, monkeypatch):
    end, ended = at_exit
    monkeypatch.setattr(sys, "last_value", ValueError("no room"), raising=False)
    end()
    assert ended


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_of_a_process_of_multiprocessing_is_known(at_exit, error):
    end, ended = at_exit
    with pytest.raises(error):
        try:
            raise error
        finally:
            util._exit_function()
    end()
    assert ended


JOB = """
import mindspeed.megatron_adaptor
import os, sys
import torch
import torch.distributed as dist

def main(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")  # its collectives may take 30 minutes
    started, waited = dist.new_group(), dist.new_group()
    for group in (started, waited):
        dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        work = dist.all_reduce(torch.ones(1), group=started, async_op=True)
        raise ValueError("no room")
    dist.all_reduce(torch.ones(1), group=waited)

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(main, nprocs=2)
    else:
        main(int(os.environ["RANK"]))
"""


@pytest.mark.weekly_cases("spawn")
@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["torchrun", "spawn"])
def test_both_ranks_of_a_framework_end(tmp_path, started_by):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*(launcher if started_by == "torchrun" else []), str(script), started_by]
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"MINDSPEED_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no room") == 1
