"""What test_training.py runs: a tiny GPT through Megatron, on whatever device this process has."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TINY = shlex.split("""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --lr-decay-style linear --train-iters 3 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 100 --log-interval 1 --eval-iters 0 --adam-eps 1e-2
""")
"""The large epsilon keeps updates proportional to gradients: Adam's own divides a gradient by its
size, so one that is rounding noise would move a weight by the whole learning rate, either way."""


def train(flags: Sequence[str]) -> dict[str, Any]:
    """Trains for three steps.

    Returns:
        ``iteration`` (last done), ``devices`` of the parameters, ``backend`` of the groups,
        ``calls`` of operators that only an NPU has, by name, and ``gradients`` of the last step, by
        chunk and name.
    """
    import os
    import sys

    import torch.distributed as dist

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    modules = []
    seen = {}

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        seen["backend"] = dist.get_backend()
        return modules[-1]

    settings = _prepare([*TINY, *flags], int(os.environ["WORLD_SIZE"]))
    seen["iteration"] = pretrain(settings, provider)
    seen["devices"] = sorted({p.device.type for module in modules for p in module.parameters()})
    seen["gradients"] = {
        f"{chunk} {name}": parameter.main_grad.float().cpu()
        for chunk, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    emulation = sys.modules.get("tests.npu_emulator.emulation")
    seen["calls"] = dict(emulation.calls) if emulation else {}
    return seen


def records(log: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    import json

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [(line["lm_loss"], line["grad_norm"]) for line in lines if "lm_loss" in line]
