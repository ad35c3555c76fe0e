"""The parts of a training run that count: model, optimizer and one step on invented tokens."""

from __future__ import annotations

import argparse
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    unset_num_microbatches_calculator,
)

from mindspeed.built_model import TrainedModel
from mindspeed.device.wrapped_tensors import held
from mindspeed.instruments.live_memory import LiveMemory
from mindspeed.job import Batch
from mindspeed.planner.loop import loop_of
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
        self._args, self._memory = args, memory
        self._batch_of(micro_batches)
        self.micro_batches = int(get_num_microbatches())
        memory.kind = "weights"
        loop = loop_of(args)
        self.model: TrainedModel = loop.build(args)
        parameters = (p for chunk in self.model.chunks for p in chunk.parameters())
        self.parameters = sum(one.numel() for p in parameters for one in held(p))
        self._step = loop.step_of(args, self.model)
        self._temporary_inside(self.model.chunks[0].config, "finalize_model_grads_func")
        self._temporary_inside(self.model.optimizer, "step")

    def run(self) -> None:
        """One step."""
        self._memory.kind = "activations"
        self._step()

    def run_shortest(self) -> None:
        """One step of a single micro-batch; the next one is as long as the job's."""
        self._batch_of(1)
        self.run()
        self._batch_of(self.micro_batches)

    def _batch_of(self, micro_batches: int | None) -> None:
        """Let a step have as many micro-batches; None: those of the job."""
        args = self._args
        if micro_batches is not None:
            args.global_batch_size = Batch.of(args).samples_of(micro_batches)
            args.rampup_batch_size = None
        unset_num_microbatches_calculator()
        count_batches(args)

    def _temporary_inside(self, holder: Any, name: str) -> None:
        """What a function makes is neither activation nor state, unless it is claimed."""
        function = getattr(holder, name, None)
        if function is None:
            return

        def inside(*args: Any, **kwargs: Any) -> Any:
            before, self._memory.kind = self._memory.kind, "temporary"
            try:
                return function(*args, **kwargs)
            finally:
                self._memory.kind = before

        setattr(holder, name, inside)
