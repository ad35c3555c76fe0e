"""Our trainer on a GPU, beside the same job from the same weights on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SMALL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 1000
    --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --swiglu --seed 5
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --mock-data
    --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --transformer-impl local --eval-iters 0
    --log-interval 1
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --moe-ffn-hidden-size 256
"""
LATENT = """
    --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 32
    --qk-pos-emb-head-dim 16 --v-head-dim 32
"""
FUSED = "--use-flash-attn --use-fused-rmsnorm --use-fused-rotary-pos-emb --use-fused-swiglu"
JOBS = {
    # flags of the model, further flags
    "plain": ("", ""),
    "fused": ("", FUSED),
    "fused in bf16": ("", FUSED + " --bf16"),
    "swapped states": ("", "--bf16 --use-distributed-optimizer --swap-optimizer"),
    "experts": (EXPERTS, ""),
    "fused experts": (EXPERTS, "--use-fused-moe-token-permute-and-unpermute"),
    "latent attention": (LATENT, ""),
    "ZeRO 2": ("", "--zero-stage 2"),
    "ZeRO 3": ("", "--zero-stage 3 --bf16"),
}


def train(device: str, *flags: str) -> None:
    environment = {**os.environ, "MINDSPEED_DEVICE": device}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    words = " ".join([SMALL, *flags]).split()
    command = [sys.executable, "-m", "mindspeed", "pretrain", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", JOBS)
def test_losses_and_norms_on_a_gpu_are_those_of_the_cpu(name, tmp_path):
    model, further = JOBS[name]
    weights = tmp_path / "weights"
    train("cpu", model, f"--train-iters 1 --lr 0 --min-lr 0 --save {weights}")
    start = f"--load {weights} --finetune --no-load-optim --no-load-rng"
    curves = []
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.jsonl"
        run = f"--train-iters 8 --lr 1e-3 --min-lr 1e-3 --metrics-file {file}"
        train(device, model, further, start, run)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        curves.append([(row["lm_loss"], row["grad_norm"]) for row in rows])
    tolerance = 5e-2 if "--bf16" in further else 2e-3  # kernels round bf16 in other places
    torch.testing.assert_close(
        torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=tolerance, atol=tolerance
    )
