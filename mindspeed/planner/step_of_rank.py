"""The parts of a training run that count: model, optimizer and one step on invented tokens."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
)

from mindspeed import device
from mindspeed.built_model import TrainedModel
from mindspeed.testing.live_memory import LiveMemory
from mindspeed.training.forward_step import checked, forward_step
from mindspeed.training.model import build
from mindspeed.training.pretrain import count_batches
from mindspeed.training.step import Trainer


class StepOfRank:
    """The trainer of this rank, ready to run steps.

    Args:
        args: final values.
        memory: is told what the tensors are that are made.
        micro_batches: of a step; default: those of the job.
    """

    def __init__(
        self, args: argparse.Namespace, memory: LiveMemory, micro_batches: int | None = None
    ) -> None:
        self._args, self._memory = args, memory
        if micro_batches is not None:
            args.global_batch_size = micro_batches * args.micro_batch_size * args.data_parallel_size
            args.rampup_batch_size = None
        count_batches(args)
        self.micro_batches = int(get_num_microbatches())
        memory.kind = "weights"
        self.model: TrainedModel = build(args)
        self.parameters = sum(p.numel() for chunk in self.model.chunks for p in chunk.parameters())
        self._trainer = Trainer(args, self.model, checked(forward_step, args, ()))
        self._readers = [_batches(args) for _ in self.model.chunks]

    def run(self) -> None:
        """One step."""
        self._memory.kind = "activations"
        self._trainer.step(self._readers, 1)


def _batches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Batches as :mod:`mindspeed.training.batches` yields them, without end."""
    shape = (args.micro_batch_size, args.seq_length // args.context_parallel_size)
    where = device.current().torch_device()
    while True:
        tokens = torch.zeros(shape, dtype=torch.int64, device=where)
        yield {
            "tokens": tokens,
            "labels": tokens.clone(),
            "position_ids": torch.arange(shape[1], device=where).expand(shape),
            "loss_mask": torch.ones(shape, device=where),
            "attention_mask": None,
        }
