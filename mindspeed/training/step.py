"""One training step: forward and backward over all micro-batches, then the optimizer.

    zero gradients -> schedule(forward_step) -> optimizer.step -> learning rate

The loss stays on its device as (sum, tokens) per micro-batch; nothing is reduced or copied to the
host here except one look whether it is finite (``--no-check-for-nan-in-loss-and-grad`` drops it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func

from mindspeed import device
from mindspeed.built_model import TrainedModel
from mindspeed.errors import TrainingError
from mindspeed.training import zero
from mindspeed.training.batches import MicroBatches
from mindspeed.training.data import Reader
from mindspeed.training.overflow import SkippedSteps


@dataclass(frozen=True)
class StepResult:
    """What one step leaves for the log.

    Attributes:
        losses: [micro-batches, 2]: sum of the token losses and number of tokens; last stage only.
        grad_norm: norm of the gradients before clipping; None without parameters on this rank.
        skipped: the parameters were not changed.
    """

    losses: torch.Tensor | None
    grad_norm: float | None
    skipped: bool


class Trainer:
    """Runs steps on one model.

    Args:
        args: final values.
        model: the model, its optimizer and its schedule.
    """

    def __init__(self, args: argparse.Namespace, model: TrainedModel) -> None:
        self._args = args
        self._model = model
        self._schedule = get_forward_backward_func()
        self._nonfinite = 0
        self.skipped = SkippedSteps(args)

    def step(self, readers: Sequence[Reader | None], iteration: int) -> StepResult:
        """Run one optimizer step.

        Raises:
            TrainingError: a loss or gradient is not finite; names iteration, rank and micro-batch.
        """
        model, args = self._model, self._args
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        follows = int(iteration < args.train_iters)  # the next step's first may be read now
        losses = self._run_schedule(
            readers, get_num_microbatches(), forward_only=False, follows=follows
        )
        if args.max_skipped_nan_iterations and self._must_skip(losses, iteration):
            return StepResult(losses, None, skipped=True)
        if args.check_for_nan_in_loss_and_grad:
            check_losses(losses, iteration)
        updated, grad_norm, _ = model.optimizer.step()
        if args.check_for_nan_in_loss_and_grad:
            self._check_gradients(grad_norm, iteration)
        self.skipped.after_step(updated, losses, model.optimizer.get_loss_scale, iteration)
        if updated:
            model.schedule.step(
                get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            )
        return StepResult(losses, grad_norm, skipped=not updated)

    def evaluate(
        self, readers: Sequence[Reader | None], num_microbatches: int
    ) -> torch.Tensor | None:
        """Losses of so many micro-batches without gradients, as in :class:`StepResult`."""
        with torch.no_grad():
            return self._run_schedule(readers, num_microbatches, forward_only=True)

    def _run_schedule(
        self,
        readers: Sequence[Reader | None],
        num_microbatches: int,
        *,
        forward_only: bool,
        follows: int = 0,
    ) -> torch.Tensor | None:
        model, args = self._model, self._args
        for reader in readers:
            if isinstance(reader, MicroBatches):
                reader.expect(num_microbatches + follows)
        single = len(model.chunks) == 1
        reports = self._schedule(
            forward_step_func=forward_step,
            data_iterator=readers[0] if single else list(readers),
            model=model.chunks[0] if single else model.chunks,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )
        return torch.stack(reports) if reports else None

    def _must_skip(self, losses: torch.Tensor | None, iteration: int) -> bool:
        """Whether any rank has a loss or gradient that is not finite; one reduction of 4 bytes."""
        finite = torch.ones((), dtype=torch.bool, device=device.current().torch_device())
        for chunk in self._model.chunks:
            for gradients in zero.gradients(chunk):
                finite &= torch.isfinite(gradients.sum())
        if losses is not None:
            finite &= torch.isfinite(losses).all()
        bad = (~finite).to(torch.int32)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad.item():
            return False
        self._nonfinite += 1
        limit = self._args.max_skipped_nan_iterations
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


def forward_step(
    reader: Reader | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Forward pass of one micro-batch through one stage; Megatron's schedules call it.

    Args:
        reader: micro-batches; None on a stage in the middle, which needs none.
        model: one chunk.
        return_schedule_plan: return what the pass would compute, in parts that the schedule runs
            between those of another micro-batch (``--overlap-moe-expert-parallel-comm``).
    """
    compute = model.build_schedule_plan if return_schedule_plan else model
    if reader is None:  # a stage in the middle; its loss function is never called
        return compute(None, None, None), token_losses
    batch = next(reader)
    packing = {key: batch[key] for key in ("packed_seq_params",) if key in batch}
    output = compute(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **packing,
    )
    # Without a mask the stage is not the last one and its loss function is never called.
    return output, partial(token_losses, batch["loss_mask"])  # type: ignore[arg-type]


def token_losses(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of the token losses, number of tokens, and both as the report of the micro-batch."""
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum()
    return total, count.to(torch.int), torch.stack([total.detach(), count])


def check_losses(losses: torch.Tensor | None, iteration: int) -> None:
    """Raise if a loss on this rank is not finite.

    Raises:
        TrainingError: names iteration, rank and micro-batch.
    """
    if losses is None:
        return
    finite = torch.isfinite(losses[:, 0])
    if finite.all():
        return
    index = int(torch.nonzero(~finite)[0])
    raise TrainingError(
        f"iteration {iteration}, rank {dist.get_rank()}, micro-batch {index}: the loss is "
        f"{losses[index, 0].item() / losses[index, 1].item()}; check data and learning rate, "
        "--max-skipped-nan-iterations N leaves such steps out"
    )


def _nonfinite_gradients(chunk: Any) -> list[str]:
    return [
        name
        for name, parameter in chunk.named_parameters()
        if (gradient := zero.gradient(parameter)) is not None and not torch.isfinite(gradient).all()
    ]
