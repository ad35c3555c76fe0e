"""``mindspeed finetune``: train a model further on conversations, all of it or only adapters.

``mindspeed pretrain`` with other defaults: the weights of ``--load`` (a checkpoint, or ``hf:DIR``)
are taken and training begins at iteration 0, the data are conversations (``mindspeed preprocess``).
``--lora-target-modules`` trains low-rank adapters of the frozen model instead. Interrupted runs go
on with ``--auto-resume``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.cli.pretrain import train

HELP = "train a model further on conversations: all of it, or adapters (LoRA)"
PASS_THROUGH = True


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed finetune --help``."""
    return train(argv, "finetune", {"finetune": True, "is_instruction_dataset": True})
