"""fp16: a run whose steps are all skipped is an error.

Dynamic loss scaling skips a step whose gradients overflow and lowers the scale: some steps at the
start of a run, one now and then later. Two problems remain: a loss that is itself not finite
(the scale is applied after it), and gradients that overflow at the smallest scale. Either one,
many times in a row or in every step, ends the run with an error.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from mindspeed.errors import TrainingError
from mindspeed.training.forward_step import MicroBatchLoss, first_not_finite

IN_A_ROW = 8


class SkippedSteps:
    """Counts skipped steps of a run with dynamic loss scaling.

    Args:
        args: final values: ``fp16``, ``loss_scale`` and ``min_loss_scale``.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._active = bool(args.fp16) and not args.loss_scale
        self._smallest = args.min_loss_scale
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
