"""A rank that raises inside a program of experts ends Megatron-LM's script on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mindspeed.processes import free_port
from tests.megatron_lm.launch import ADAPTOR_LINE, megatron_checkout, script_with_adaptor
from tests.megatron_lm.test_matrix import MOE, TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

FAULT = """
def _fail(self, chunk):
    if torch.distributed.get_rank() == 1:  # the other rank never joins this
        _fail.work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("no room")
    return _arrange(self, chunk)

from mindspeed.moe.dispatch.all_to_all import AllToAllDispatcher
_arrange, AllToAllDispatcher.arrange = AllToAllDispatcher.arrange, _fail
"""


def test_the_error_is_shown_once_and_all_ranks_end(tmp_path):
    checkout = megatron_checkout()
    script = script_with_adaptor(checkout, tmp_path)
    script.write_text(script.read_text().replace(ADAPTOR_LINE, ADAPTOR_LINE + FAULT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(script)]
    flags = "--expert-model-parallel-size 2 --moe-alltoall-overlap-comm"
    flags += " --distributed-timeout-minutes 30"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), env.get("PYTHONPATH"))))
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    done = subprocess.run(
        [*command, *f"{MOE} {TRAINING} {flags}".split()],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no room") == 1, done.stdout[-3000:]
