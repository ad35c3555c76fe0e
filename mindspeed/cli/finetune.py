"""``mindspeed finetune``: fine-tune a model on conversations, all weights or LoRA adapters.

    mindspeed finetune --load hf:models/qwen3-8b --data chat.jsonl --lora-r 16

``mindspeed pretrain`` with other defaults: training starts at iteration 0 from the weights of
``--load`` (a checkpoint, or ``hf:DIR``), the data are conversations: files of them (``--data``), or
data sets of ``mindspeed preprocess`` (``--data-path``). ``--lora-r`` and ``--lora-target-modules``
freeze the model and train low-rank adapters. ``--auto-resume`` continues an interrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.cli.pretrain import train

HELP = "fine-tune a model on conversations: all weights, or LoRA adapters"
PASS_THROUGH = True
DEFAULTS = {"finetune": True, "is_instruction_dataset": True}


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed finetune --help``."""
    return train(argv, "finetune", DEFAULTS)
