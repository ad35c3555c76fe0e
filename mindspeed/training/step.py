"""One training step: forward and backward over all micro-batches, then the optimizer.

    zero gradients -> schedule(forward_step) -> optimizer.step -> learning rate

Losses stay on their device, one per micro-batch; nothing is reduced or copied to the host here
except one check that they are finite (``--no-check-for-nan-in-loss-and-grad`` drops it).

fp16: dynamic loss scaling skips a step whose gradients overflow and lowers the scale, some steps at
the start of a run, one now and then later. Two problems remain: a loss that is itself not finite
(the scale is applied after it), and gradients that overflow at the smallest scale. Either one, many
times in a row or in every step, ends the run with an error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func

from mindspeed import device, session
from mindspeed.adaptor.versions.trainer import learning_rate
from mindspeed.built_model import TrainedModel
from mindspeed.errors import TrainingError
from mindspeed.flags import read
from mindspeed.job import Batch, Schedule
from mindspeed.training import zero
from mindspeed.training.batches import MicroBatches
from mindspeed.training.configs import optimizer_config
from mindspeed.training.data import Reader
from mindspeed.training.forward_step import ForwardStep, MicroBatchLoss, first_not_finite
from mindspeed.training.options import DataOptions, TrainingOptions


@dataclass(frozen=True)
class StepResult:
    """Results of one step, for the log.

    Attributes:
        losses: one per micro-batch; empty on all stages but the last.
        grad_norm: norm of the gradients before clipping; None without parameters on this rank.
        skipped: the parameters were not changed.
        learning_rate: the rate of this step, which the schedule has moved on since.
    """

    losses: list[MicroBatchLoss]
    grad_norm: float | None
    skipped: bool
    learning_rate: float | None


class Trainer:
    """Runs steps on one model.

    Args:
        args: final values.
        model: the model, its optimizer and its schedule.
        forward_step: computes one micro-batch (:func:`mindspeed.training.forward_step.checked`).
        before: called before each schedule with the readers, the number of micro-batches, and a
            function that runs the schedule forward only on other readers, chunks and forward step.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        model: TrainedModel,
        forward_step: ForwardStep,
        before: BeforeStep | None = None,
    ) -> None:
        self._args = args
        self._options, self._batch = read(TrainingOptions, args), Batch.of(args)
        self._iterations = Schedule.of(args).iterations
        self._model = model
        self._forward_step = forward_step
        self._before = before
        session.install().reached.stop_watching()  # the loop judges for all ranks
        self._schedule = get_forward_backward_func()
        self._nonfinite = 0
        self.skipped = SkippedSteps(optimizer_config(args))

    def step(self, readers: Sequence[Reader | None], iteration: int) -> StepResult:
        """Run one optimizer step.

        Raises:
            TrainingError: a loss or gradient is not finite; names iteration, rank and micro-batch.
        """
        model, options = self._model, self._options
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        rate = learning_rate(model.optimizer.param_groups)
        follows = int(iteration < self._iterations)  # the next step's first may be read now
        losses = self._run_schedule(
            readers, get_num_microbatches(), forward_only=False, follows=follows
        )
        if options.max_skipped_nan_iterations and self._must_skip(losses, iteration):
            return StepResult(losses, None, skipped=True, learning_rate=rate)
        if options.check_for_nan_in_loss_and_grad:
            check_losses(losses, iteration)
        updated, grad_norm, _ = model.optimizer.step()
        if options.check_for_nan_in_loss_and_grad:
            self._check_gradients(grad_norm, iteration)
        self.skipped.after_step(updated, losses, model.optimizer.get_loss_scale, iteration)
        if updated:
            model.schedule.step(self._batch.samples_of(get_num_microbatches()))
        return StepResult(losses, grad_norm, skipped=not updated, learning_rate=rate)

    def evaluate(
        self, readers: Sequence[Reader | None], num_microbatches: int
    ) -> list[MicroBatchLoss]:
        """Losses of ``num_microbatches`` micro-batches without gradients, last stage only."""
        with torch.no_grad():
            return self._run_schedule(readers, num_microbatches, forward_only=True)

    def _run_schedule(
        self,
        readers: Sequence[Reader | None],
        num_microbatches: int,
        *,
        forward_only: bool,
        follows: int = 0,
    ) -> list[MicroBatchLoss]:
        for reader in readers:
            if isinstance(reader, MicroBatches):
                reader.announce(num_microbatches + follows)
        if self._before is not None:
            self._before(readers, num_microbatches, self._run_forward)
        losses: list[MicroBatchLoss] = run_schedule(
            self._args,
            self._schedule,
            self._forward_step,
            readers,
            self._model.chunks,
            num_microbatches,
            forward_only=forward_only,
        )
        return losses

    def _run_forward(
        self, forward_step: ForwardStep, readers: Sequence[Any], chunks: list[Any], count: int
    ) -> list[Any]:
        config = self._model.config
        synchronize, config.param_sync_func = config.param_sync_func, None
        try:
            return run_schedule(
                self._args,
                self._schedule,
                forward_step,
                readers,
                chunks,
                count,
                forward_only=True,
            )
        finally:
            config.param_sync_func = synchronize

    def _must_skip(self, losses: Sequence[MicroBatchLoss], iteration: int) -> bool:
        """Whether any rank has a loss or gradient that is not finite; one reduction of 4 bytes."""
        finite = torch.ones((), dtype=torch.bool, device=device.current().torch_device())
        for chunk in self._model.chunks:
            for gradients in zero.gradients(chunk):
                finite &= torch.isfinite(gradients.sum())
        for micro_batch in losses:
            finite &= torch.isfinite(micro_batch.loss)
        bad = (~finite).to(torch.int32)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad.item():
            return False
        self._nonfinite += 1
        limit = self._options.max_skipped_nan_iterations
        if self._nonfinite > limit:
            check_losses(losses, iteration)
            raise TrainingError(
                f"iteration {iteration}: a loss or gradient is not finite, for the "
                f"{self._nonfinite}th time; --max-skipped-nan-iterations allows {limit}"
            )
        return True

    def _check_gradients(self, grad_norm: float | None, iteration: int) -> None:
        if grad_norm is None or math.isfinite(grad_norm):
            return
        names = [name for chunk in self._model.chunks for name in _nonfinite_gradients(chunk)]
        where = f"here in {', '.join(names[:3])}" if names else "on another rank"
        raise TrainingError(
            f"iteration {iteration}, rank {dist.get_rank()}: the gradient norm is {grad_norm} "
            f"({where}) although the loss is finite; a lower --lr, --clip-grad or bf16 instead of "
            "fp16 may help, --max-skipped-nan-iterations N leaves such steps out"
        )


RunForward = Callable[[ForwardStep, Sequence[Any], list[Any], int], list[Any]]
BeforeStep = Callable[[Sequence[Any], int, RunForward], None]


def run_schedule(
    args: argparse.Namespace,
    schedule: Callable[..., Any],
    forward_step: ForwardStep,
    readers: Sequence[Any],
    chunks: list[Any],
    num_microbatches: int,
    *,
    forward_only: bool,
) -> list[Any]:
    """Run a schedule of Megatron's; returns what the loss functions returned, last stage only."""
    single = len(chunks) == 1
    found: list[Any] = schedule(
        forward_step_func=forward_step,
        data_iterator=readers[0] if single else list(readers),
        model=chunks[0] if single else chunks,
        num_microbatches=num_microbatches,
        seq_length=read(DataOptions, args).seq_length,
        micro_batch_size=Batch.of(args).micro,
        forward_only=forward_only,
    )
    return found


def check_losses(losses: Sequence[MicroBatchLoss], iteration: int) -> None:
    """Raise if a loss on this rank is not finite.

    Raises:
        TrainingError: names iteration, rank and micro-batch.
    """
    index = first_not_finite(losses)
    if index is None:
        return
    micro_batch = losses[index]
    count = 1 if micro_batch.num_tokens is None else micro_batch.num_tokens.item()
    raise TrainingError(
        f"iteration {iteration}, rank {dist.get_rank()}, micro-batch {index}: the loss is "
        f"{micro_batch.loss.item() / max(1, count)}; check data and learning rate, "
        "--max-skipped-nan-iterations N leaves such steps out"
    )


def _nonfinite_gradients(chunk: Any) -> list[str]:
    return [
        name
        for name, parameter in chunk.named_parameters()
        if (gradient := zero.gradient(parameter)) is not None and not torch.isfinite(gradient).all()
    ]


IN_A_ROW = 8


class SkippedSteps:
    """Counts skipped steps of a run with dynamic loss scaling.

    Args:
        config: of the optimizer: ``fp16``, ``loss_scale`` and ``min_loss_scale``.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._active = config.fp16 and not config.loss_scale
        self._smallest = config.min_loss_scale
        self._steps = self._updates = 0
        self._bad_losses = self._at_smallest = 0

    def after_step(
        self,
        updated: bool,
        losses: Sequence[MicroBatchLoss],
        scale: Callable[[], torch.Tensor],
        iteration: int,
    ) -> None:
        """Count one step.

        Args:
            updated: whether the parameters were changed.
            losses: of the micro-batches of this rank.
            scale: returns the current loss scale, an fp32 tensor ``[1]``.
            iteration: for the message.

        Raises:
            TrainingError: steps are skipped for a reason that no loss scale changes.
        """
        if not self._active:
            return
        self._steps += 1
        if updated:
            self._updates += 1
            self._bad_losses = self._at_smallest = 0
            return
        bad = first_not_finite(losses) is not None
        self._bad_losses = self._bad_losses + 1 if bad else 0
        self._at_smallest = self._at_smallest + 1 if float(scale()) <= self._smallest else 0
        if self._bad_losses >= IN_A_ROW:
            raise TrainingError(f"iteration {iteration}: {self._bad_loss(IN_A_ROW)}")
        if self._at_smallest >= IN_A_ROW:
            raise TrainingError(
                f"iteration {iteration}: the gradients overflow at the smallest loss scale "
                f"(--min-loss-scale {self._smallest:g}) in {IN_A_ROW} steps in a row: check "
                "weights and data, lower --lr, or train in --bf16"
            )

    def at_end(self, iteration: int) -> str | None:
        """A warning for a run that has changed nothing; None where there is nothing to say.

        Raises:
            TrainingError: all steps were skipped, the last for a loss that is not finite.
        """
        if not self._steps or self._updates:
            return None
        if self._bad_losses:
            raise TrainingError(f"iteration {iteration}: {self._bad_loss(self._steps)}")
        return (
            f" WARNING none of the {self._steps} steps of this run changed the model: the loss "
            "scale is still falling; train longer, or lower --initial-loss-scale"
        )

    def _bad_loss(self, steps: int) -> str:
        return (
            f"the loss is not finite and {steps} steps in a row were skipped, which no loss scale "
            "can change: check the weights that were loaded and the data, or train in --bf16"
        )
