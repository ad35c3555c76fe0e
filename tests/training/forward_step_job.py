"""Trains with forward steps of a user: functions for the ranks of a pool."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.trainer_job import command

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def own(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """A forward step in Megatron-LM's style, written without ours."""

    def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        if data_iterator is None:
            return model(None, None, None), loss_function
        batch = next(data_iterator)
        mask = batch["loss_mask"]
        inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
        output = model(*inputs, labels=batch["labels"], loss_mask=mask)
        return output, partial(loss_function, mask)

    return forward_step


def token_sum(mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    total = (losses.float() * mask).sum()
    count = mask.sum()
    return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}


def token_mean(mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    """The older form: a mean over the micro-batch, and reports of one element."""
    mean = (losses.float() * mask).sum() / mask.sum()
    data_rank = torch.distributed.get_rank() if torch.distributed.get_world_size() > 1 else 0
    return mean, {"lm loss": mean.detach(), "data rank": torch.tensor(float(data_rank))}


def penalised(mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
    total, count, reports = token_sum(mask, losses)
    squares = (losses.float().square() * mask).sum()
    reports["squared loss"] = torch.stack([squares.detach(), mask.sum()])
    return total + 0.1 * squares, count, reports


def triple(data_iterator: Any, model: Any) -> Any:
    """Not the contract: it returns what the loss function should."""
    return token_sum(torch.ones(1), torch.ones(1))


STEPS: dict[str, Callable[..., Any]] = {
    "sum": own(token_sum),
    "mean": own(token_mean),
    "penalised": own(penalised),
    "triple": triple,
}


def train(flags: Sequence[str], step: str | None) -> str | None:
    """Train with one of :data:`STEPS`, or with the default; returns the error."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError
    from mindspeed.training.pretrain import pretrain

    given = {} if step is None else {"forward_step": STEPS[step]}
    try:
        pretrain(_prepare(command(flags), int(os.environ["WORLD_SIZE"])), **given)
    except MindSpeedError as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_the_example(flags: Sequence[str]) -> None:
    """Run the script of the documentation as it is printed."""
    (script,) = re.findall(r"```python\n(# train\.py.*?)```", PAGE.read_text(), re.DOTALL)
    sys.argv = ["train.py", *command(flags)]
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})
