"""Training on preferences: the forward step of ``mindspeed dpo``.

    before a step   its micro-batches are read; their pairs are counted over all ranks (24 bytes)
                    the reference model runs forward on all of them, unless its log-probabilities
                    are known (:mod:`mindspeed.training.reference`)
    the step        model -> log-probabilities of next tokens -> sums of each answer -> loss

The loss of a step is a mean over all its pairs, whatever their number in a micro-batch or on a
rank is: each micro-batch contributes its sum, divided by the number of the step.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed.adaptor.micro_batch import FullBatch
from mindspeed.flags import read
from mindspeed.preference.answers import Answers
from mindspeed.preference.losses import (
    PreferenceLoss,
    Reports,
    Totals,
    kl_term,
    loss_of,
    reward_loss,
)
from mindspeed.preference.options import PreferenceOptions
from mindspeed.training.model import ModelProvider
from mindspeed.training.reference import (
    Chunks,
    answers_in,
    forward,
    reference_of,
    reference_step,
)
from mindspeed.training.step import RunForward


def step_of(
    args: argparse.Namespace,
    chunks: list[Any],
    provider: ModelProvider,
    *,
    read_weights: bool = True,
) -> PreferenceStep | RewardStep | None:
    """The forward step of the pairs of a run; None for the next token. Collective.

    Args:
        args: final values.
        chunks: of the model.
        provider: of the model.
        read_weights: of a second copy that is the reference model.
    """
    options = read(PreferenceOptions, args)
    if options.objective == "preference":
        reference = reference_of(args, chunks, provider, read_weights=read_weights)
        return PreferenceStep(PreferenceLoss.of(options), reference)
    return RewardStep(options.center_rewards_coefficient) if options.objective == "reward" else None


class _Pairs:
    """The pairs of a step, counted before its micro-batches.

    Attributes:
        totals: numbers by which the sums of a step are divided; on the last stage.
    """

    def __init__(self) -> None:
        self.totals: Totals | None = None
        self._scale = 1.0

    def before(self, readers: Sequence[Any], count: int, run_forward: RunForward) -> None:
        """Count the pairs of a step. Collective."""
        last = [one for one in readers if one is not None and one.post_process]
        if last:
            ranks = parallel_state.get_data_parallel_group()
            self.totals = totals_of(last[0].ahead(count), ranks)
            self._scale = float(count * ranks.size())


class PreferenceStep(_Pairs):
    """Forward step of preferences.

    Args:
        loss: of the answers.
        reference: context manager that yields the chunks of the reference model; None without one,
            and where the data have its log-probabilities.
    """

    def __init__(self, loss: PreferenceLoss, reference: Chunks | None) -> None:
        super().__init__()
        self._loss = loss
        self._reference = reference
        self._references: deque[torch.Tensor] = deque()

    def before(self, readers: Sequence[Any], count: int, run_forward: RunForward) -> None:
        """Count the pairs of a step and run the reference model on them. Collective."""
        super().before(readers, count, run_forward)
        if self._reference is not None:
            with torch.no_grad(), self._reference() as chunks:
                again = [None if one is None else one.preview(count) for one in readers]
                self._references.extend(run_forward(reference_step, again, chunks, count))

    def __call__(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """The losses of the next tokens of a micro-batch, and the function of its loss."""
        compute = model.build_schedule_plan if return_schedule_plan else model
        batch, output = forward(data_iterator, compute)
        return output, partial(self._loss_function, batch)

    def _loss_function(
        self, batch: dict[str, Any], losses: torch.Tensor
    ) -> tuple[torch.Tensor, Reports]:
        answers = answers_in(batch, losses)
        if self._reference is not None:
            answers = with_references(answers, self._references.popleft())
        assert self.totals is not None
        kl = None
        if self._loss.unpaired:
            ratios = kl_term(answers)
            dist.all_reduce(ratios, group=parallel_state.get_data_parallel_group())
            kl = (ratios[0] / ratios[1].clamp(min=1)).clamp(min=0)
        part, reports = loss_of(self._loss, answers, self.totals, kl)
        loss = part * self._scale  # Megatron takes the mean over micro-batches and replicas
        return loss, {"loss": loss.detach(), **reports}


def with_references(answers: Answers, references: torch.Tensor) -> Answers:
    """Answers with the reference's log-probabilities ``[pairs, 2]``."""
    return replace(answers, references=references)


class RewardStep(_Pairs):
    """Forward step of a reward model, whose output is a score for each token.

    The reward of an answer is the score of its last token, the only one in the loss mask.

    Args:
        center: add this times the square of the sum of rewards.
    """

    def __init__(self, center: float) -> None:
        super().__init__()
        self._center = center

    def __call__(self, data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        """The scores of the tokens of a micro-batch ``[b, s, 1]``, and the function of its loss."""
        batch, output = forward(data_iterator, model, labels=False)
        return output, partial(self._loss_function, batch)

    def _loss_function(
        self, batch: dict[str, Any], scores: torch.Tensor
    ) -> tuple[torch.Tensor, Reports]:
        answers = answers_in(batch, -scores.squeeze(-1))
        assert self.totals is not None
        part, reports = reward_loss(
            answers.logps, answers.values, answers.real, self.totals.pairs, self._center
        )
        loss = part * self._scale
        return loss, {"loss": loss.detach(), **reports}


@torch.no_grad()
def totals_of(batches: Sequence[FullBatch], ranks: Any) -> Totals:
    """Numbers of the pairs and tokens of a step. Collective: 24 bytes.

    Args:
        batches: micro-batches of this rank, on the last stage.
        ranks: data-parallel group.
    """
    sums = torch.stack([_numbers(batch.tensors) for batch in batches]).sum(dim=0)
    dist.all_reduce(sums, group=ranks)
    return Totals(*sums.clamp(min=1).float().unbind())


def _numbers(tensors: dict[str, Any]) -> torch.Tensor:
    """Pairs, tokens of chosen answers, and these with their prompts: int64 ``[3]``."""
    answers = tensors["answers"]
    chosen = answers % 2 == 1
    trained = (tensors["loss_mask"] * chosen).sum().long()
    return torch.stack([answers.amax() // 2, trained, chosen.sum()])
