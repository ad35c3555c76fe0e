"""Run an unmodified ``pretrain_gpt.py`` plus the one import line, and read its log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mindspeed.processes import free_port
from mindspeed.testing import RankError, RankPool
from tests.megatron_lm.script_ranks import SETUP, run_script

ADAPTOR_LINE = "import mindspeed.megatron_adaptor\n"
_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+)", re.S)


@dataclass(frozen=True)
class Run:
    """The printed losses and gradient norms of a run."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    output: str


def megatron_checkout() -> Path:
    """The checkout named by MEGATRON_LM_PATH, or skip."""
    path = os.environ.get("MEGATRON_LM_PATH")
    if not path:
        pytest.skip("set MEGATRON_LM_PATH to a Megatron-LM core_v0.16.1 checkout")
    return Path(path)


def script_with_adaptor(checkout: Path, directory: Path) -> Path:
    """A copy of ``pretrain_gpt.py`` with our line after ``import torch``."""
    lines = (checkout / "pretrain_gpt.py").read_text().splitlines(keepends=True)
    lines.insert(lines.index("import torch\n") + 1, ADAPTOR_LINE)
    script = directory / "pretrain_gpt.py"
    script.write_text("".join(lines))
    return script


pools: list[RankPool] = []  # the last one runs scripts: `forked_scripts` of conftest.py


def pretrain(directory: Path, nproc: int, *flags: str, timeout: int = 300) -> Run:
    """Train with ``nproc`` ranks on this machine, under torchrun unless there is a pool.

    Raises:
        AssertionError: the run failed; carries the end of its output.
    """
    checkout = megatron_checkout()
    script = script_with_adaptor(checkout, directory)
    if pools:
        return _read(_forked(script, nproc, flags, timeout))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", str(script), *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), env.get("PYTHONPATH"))))
    env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # a GPU's, not demanded from a CPU
    done = subprocess.run(
        command, env=env, cwd=directory, capture_output=True, text=True, timeout=timeout
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return _read(output)


def _forked(script: Path, nproc: int, flags: Sequence[str], timeout: int) -> str:
    """What the ranks print."""
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder, "rank")
        request = (run_script, str(script), flags, str(logs))
        try:
            pools[-1].run(nproc, *request, setup=SETUP, backend=None, timeout=timeout)
        except RankError as error:
            raise AssertionError(f"{_text(logs, nproc)[-6000:]}\n{error}") from error
        return _text(logs, nproc)


def _text(logs: Path, nproc: int) -> str:
    files = [Path(f"{logs}{rank}") for rank in range(nproc)]
    return "".join(file.read_text() for file in files if file.exists())


def _read(output: str) -> Run:
    rows = [(int(number), float(loss), float(norm)) for number, loss, norm in _LOSS.findall(output)]
    assert rows, output[-6000:]
    return Run(tuple(r[1] for r in rows), tuple(r[2] for r in rows), output)
