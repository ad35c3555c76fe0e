"""The first step of our trainer, and what it read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PADDING = 64
TRAINING = (
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --seed 1234 "
    f"--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    f"--make-vocab-size-divisible-by {PADDING} --eval-iters 0 --eval-interval 1000 "
    f"--log-interval 1 --seq-length 16 --distributed-timeout-minutes 2"
)


def first_step(folder: str, metrics: str, flags: Sequence[str]) -> dict[str, Any]:
    """Loss of iteration 1 with the weights of a Hugging Face directory, and its micro-batches."""
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    batch = []

    def provider(*given: Any) -> Any:
        model = gpt_model(*given)
        model.register_forward_pre_hook(
            lambda module, inputs, options: batch.append((inputs[0], options["labels"])),
            with_kwargs=True,
        )
        return model

    words = [f"--load=hf:{folder}", *TRAINING.split(), "--no-mask-padded-vocab", "--train-iters=1"]
    pretrain(prepare([*words, f"--metrics-file={metrics}", *flags], 1), provider)
    records = map(json.loads, Path(metrics).read_text().splitlines())
    loss = next(record["lm_loss"] for record in records if "lm_loss" in record)
    return {"loss": loss, "batch": batch}
