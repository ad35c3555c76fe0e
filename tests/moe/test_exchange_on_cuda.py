"""Rows that travel by sizes on the device, on two NVIDIA GPUs: losses of sizes on the host."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

JOB = """
    --num-layers 2 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 1000
    --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 8 --swiglu --seed 5
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --mock-data
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1 --train-iters 8
    --lr 1e-3 --min-lr 1e-3 --bf16 --use-distributed-optimizer --num-experts 8
    --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 256
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --moe-alltoall-overlap-comm
"""
HAVE = {
    "all-to-all": lambda: True,
    "symmetric-memory": symm_mem.is_nvshmem_available,
    "hybridep": lambda: importlib.util.find_spec("deep_ep") is not None,
}


def losses(file: Path, *flags: str) -> torch.Tensor:
    """Loss and gradient norm of every step."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    job = [*JOB.split(), *flags, "--metrics-file", str(file)]
    command = [*launch, "-m", "mindspeed", "pretrain", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return torch.tensor([(row["lm_loss"], row["grad_norm"]) for row in rows])


@pytest.mark.parametrize("bound", ["1", "2"])
@pytest.mark.parametrize("way", HAVE)
def test_losses_are_those_of_sizes_on_the_host(way, bound, tmp_path):
    """Also where a step is computed again, as its bound is too small."""
    if not HAVE[way]():
        pytest.skip(f"nothing here for {way}")
    host = losses(tmp_path / "host.jsonl")
    device = losses(
        tmp_path / "device.jsonl",
        *("--moe-device-bound", bound, "--moe-device-bound-exchange", way),
    )
    torch.testing.assert_close(device, host, rtol=5e-2, atol=5e-2)
