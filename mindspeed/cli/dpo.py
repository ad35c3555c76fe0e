"""``mindspeed dpo``: train a model on pairs of answers, all weights or LoRA adapters.

    mindspeed dpo --load hf:models/qwen3-8b --data pairs.jsonl --lora-r 16

``mindspeed finetune`` with other data and another loss: records have a prompt with a chosen and a
rejected answer (:mod:`mindspeed.data.preferences`), and ``--loss-type`` is DPO or one of its
relatives. The reference model is the one of ``--load``: a frozen second copy, or with adapters the
model without them; ``--precompute-reference`` runs it once, before training.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.cli.finetune import DEFAULTS as FINETUNE
from mindspeed.cli.pretrain import train

HELP = "train a model on pairs of answers: DPO, IPO, KTO, ORPO, SimPO"
PASS_THROUGH = True
DEFAULTS = {**FINETUNE, "objective": "preference"}


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed dpo --help``."""
    return train(argv, "dpo", DEFAULTS)
