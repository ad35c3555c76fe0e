"""Whose training step is counted: our trainer's, or that of a Megatron-LM script.

:func:`loop_of` tells which one a job's arguments belong to. Everything else of the planner treats
both alike.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch

from mindspeed import device
from mindspeed.built_model import TrainedModel
from mindspeed.planner.invented_batches import readers_of

Step = Callable[[], None]


class Loop(Protocol):
    """One training program."""

    def started(self, args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
        """Its process groups and seeds; torch.distributed is initialised."""

    def build(self, args: argparse.Namespace) -> TrainedModel:
        """Model, optimizer and schedule of this rank."""

    def step_of(self, args: argparse.Namespace, model: TrainedModel) -> Step:
        """One training step of the model on invented tokens."""


class TrainerLoop:
    """Our trainer."""

    @contextlib.contextmanager
    def started(self, args: argparse.Namespace) -> Iterator[None]:
        """Groups and seeds of the trainer."""
        from mindspeed.training import setup

        setup.parallel_groups(args)
        setup.seed_everything(args)
        yield

    def build(self, args: argparse.Namespace) -> TrainedModel:
        """The trainer's model."""
        from mindspeed.training.model import build

        return build(args)

    def step_of(self, args: argparse.Namespace, model: TrainedModel) -> Step:
        """The trainer's step."""
        from mindspeed.training.forward_step import checked, forward_step
        from mindspeed.training.step import Trainer

        trainer = Trainer(args, model, checked(forward_step, args, ()))
        readers = readers_of(args, model.config)

        def step() -> None:
            trainer.step(readers, 1)

        return step


def loop_of(args: argparse.Namespace) -> Loop:
    """The program that the arguments belong to."""
    found: Loop = vars(args).get("planned_loop") or TrainerLoop()
    return found


def batches(micro_batch_size: int, length: int) -> Iterator[dict[str, Any]]:
    """Batches of invented tokens as :mod:`mindspeed.training.batches` yields them, without end.

    Args:
        micro_batch_size: samples.
        length: tokens of each on this rank.
    """
    return iter(partial(_batch, micro_batch_size, length), None)  # keeps none of them alive


def _batch(micro_batch_size: int, length: int) -> dict[str, Any]:
    shape, where = (micro_batch_size, length), device.current().torch_device()
    tokens = torch.zeros(shape, dtype=torch.int64, device=where)
    return {
        "tokens": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.arange(length, device=where).expand(shape),
        "loss_mask": torch.ones(shape, device=where),
        "attention_mask": None,
    }
