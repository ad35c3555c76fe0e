"""Checkpoints go from Megatron-LM to our trainer and back, optimizer included, at other layouts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.megatron_lm_reference import assert_losses
from tests.support.trainer_job import SETUP, TINY, metrics, train, whole_mock_data

pytestmark = pytest.mark.slow

TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
OPTIMIZERS = {
    "plain": [],
    "distributed": ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
}
MEGATRON_ONLY = """
    --group-query-attention --max-position-embeddings 64 --eval-iters 0 --eval-interval 1000
    --num-workers 0 --save-interval 100
""".split()  # noqa: SIM905


def pretrain_gpt(checkout: Path, folder: Path, flags: list[str]) -> list[str]:
    """Losses that ``pretrain_gpt.py`` with the adaptor line prints."""
    script = folder / "pretrain_gpt.py"
    text = (checkout / "pretrain_gpt.py").read_text()
    line = "import torch\n"
    script.write_text(text.replace(line, f"{line}import mindspeed.megatron_adaptor\n", 1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "MINDSPEED_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    done = subprocess.run(
        [*command, str(script), *TINY, *MEGATRON_ONLY, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return re.findall(r"lm loss: (\S+)", done.stdout)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_our_trainer_resumes_a_megatron_lm_run(optimizer, megatron_lm, ranks, tmp_path):
    flags, save, file = OPTIMIZERS[optimizer], tmp_path / "c", tmp_path / "metrics.jsonl"
    pretrain_gpt(megatron_lm, tmp_path, [*TP2, *flags, "--save", str(save), "--exit-interval", "3"])
    load = ["--load", str(save), "--metrics-file", str(file)]
    job = train, [*PP2, *flags, *load], whole_mock_data
    results = ranks(2, *job, setup=SETUP, backend=None, timeout=300)
    assert {result["error"] for result in results} == {None}
    assert_losses([record["lm_loss"] for record in metrics(file)], "tensor-2", first=4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_megatron_lm_resumes_a_run_of_our_trainer(optimizer, megatron_lm, ranks, tmp_path):
    flags, save = OPTIMIZERS[optimizer], tmp_path / "c"
    ours = [*TP2, *flags, "--save", str(save), "--exit-interval", "3"]
    results = ranks(2, train, ours, whole_mock_data, setup=SETUP, backend=None, timeout=300)
    assert {result["error"] for result in results} == {None}
    losses = pretrain_gpt(megatron_lm, tmp_path, [*PP2, *flags, "--load", str(save)])
    assert_losses(list(map(float, losses)), "tensor-2", first=4)
