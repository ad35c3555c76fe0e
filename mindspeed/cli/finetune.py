"""``mindspeed finetune``: fine-tune a model on conversations, all weights or LoRA adapters.

``mindspeed pretrain`` with other defaults: training starts at iteration 0 from the weights of
``--load`` (a checkpoint, or ``hf:DIR``), the data are conversations (``mindspeed preprocess``).
``--lora-target-modules`` freezes the model and trains low-rank adapters. ``--auto-resume``
continues an interrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.cli.pretrain import train

HELP = "fine-tune a model on conversations: all weights, or LoRA adapters"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed finetune --help``."""
    return train(argv, "finetune", {"finetune": True, "is_instruction_dataset": True})
