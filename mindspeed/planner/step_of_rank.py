"""The parts of a training run that count: model, optimizer and one step on invented tokens."""

from __future__ import annotations

import argparse

from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    unset_num_microbatches_calculator,
)

from mindspeed.built_model import TrainedModel
from mindspeed.planner.loop import loop_of
from mindspeed.testing.live_memory import LiveMemory
from mindspeed.training.pretrain import count_batches


class StepOfRank:
    """The training program of this rank, ready to run steps.

    Args:
        args: final values.
        memory: is told what the tensors are that are made.
        micro_batches: of a step; default: those of the job.
    """

    def __init__(
        self, args: argparse.Namespace, memory: LiveMemory, micro_batches: int | None = None
    ) -> None:
        self._memory = memory
        if micro_batches is not None:
            args.global_batch_size = micro_batches * args.micro_batch_size * args.data_parallel_size
            args.rampup_batch_size = None
        unset_num_microbatches_calculator()
        count_batches(args)
        self.micro_batches = int(get_num_microbatches())
        memory.kind = "weights"
        loop = loop_of(args)
        self.model: TrainedModel = loop.build(args)
        self.parameters = sum(p.numel() for chunk in self.model.chunks for p in chunk.parameters())
        self._step = loop.step_of(args, self.model)

    def run(self) -> None:
        """One step."""
        self._memory.kind = "activations"
        self._step()
