"""``mindspeed reward``: train a reward model on pairs of answers, all weights or LoRA adapters.

    mindspeed reward --load hf:models/qwen3-8b --data pairs.jsonl --lora-r 16

The output layer gives way to a head with one number, the reward of an answer at its last token; the
chosen answer of a pair is to have the larger one, by the column ``margin`` if there is one. Records
are those of ``mindspeed dpo``. ``mindspeed export --hf`` writes the model for transformers'
``AutoModelForSequenceClassification``, whose files ``--load`` reads, head included.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed.cli.finetune import DEFAULTS as FINETUNE
from mindspeed.cli.pretrain import train

HELP = "train a reward model on pairs of answers"
PASS_THROUGH = True
DEFAULTS = {**FINETUNE, "objective": "reward"}


def run(argv: Sequence[str]) -> int:
    """Run the command; flags as in ``mindspeed reward --help``."""
    return train(argv, "reward", DEFAULTS)
