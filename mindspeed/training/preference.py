"""Training on preferences: the forward step of ``mindspeed dpo``, and the reference model.

    before a step   its micro-batches are read; their pairs are counted over all ranks (24 bytes)
                    the reference model runs forward on all of them, unless its log-probabilities
                    are known: a frozen second copy, or the model with its adapters switched off
    the step        model -> log-probabilities of next tokens -> sums of each answer -> loss

The loss of a step is a mean over all its pairs, whatever their number in a micro-batch or on a
rank is: each micro-batch contributes its sum, divided by the number of the step.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed.adaptor.micro_batch import FullBatch
from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint.load import load
from mindspeed.lora import adapted, switched_off
from mindspeed.preference.answers import Answers, answers_of
from mindspeed.preference.losses import PreferenceLoss, Reports, Totals, kl_term, loss_of
from mindspeed.training.batches import MicroBatches
from mindspeed.training.configs import transformer_config
from mindspeed.training.model import ModelProvider, build_modules
from mindspeed.training.step import RunForward

Chunks = Callable[[], Any]


class PreferenceStep:
    """Forward step of preferences.

    Args:
        args: final values.
        reference: context manager that yields the chunks of the reference model; None without one,
            and where the data have its log-probabilities.
    """

    def __init__(self, args: argparse.Namespace, reference: Chunks | None) -> None:
        self._loss = PreferenceLoss.from_args(args)
        self._reference = reference
        self._references: deque[torch.Tensor] = deque()
        self._totals: Totals | None = None
        self._scale = 1.0

    def before(self, readers: Sequence[Any], count: int, run_forward: RunForward) -> None:
        """Count the pairs of a step and run the reference model on them. Collective."""
        last = [one for one in readers if isinstance(one, MicroBatches) and one.post_process]
        if last:
            ranks = parallel_state.get_data_parallel_group()
            self._totals = totals_of(last[0].ahead(count), ranks)
            self._scale = float(count * ranks.size())
        if self._reference is not None:
            with self._reference() as chunks:
                again = [
                    one.preview(count) if isinstance(one, MicroBatches) else None for one in readers
                ]
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
        assert self._totals is not None
        kl = None
        if self._loss.unpaired:
            ratios = kl_term(answers)
            dist.all_reduce(ratios, group=parallel_state.get_data_parallel_group())
            kl = (ratios[0] / ratios[1].clamp(min=1)).clamp(min=0)
        part, reports = loss_of(self._loss, answers, self._totals, kl)
        loss = part * self._scale  # Megatron takes the mean over micro-batches and replicas
        return loss, {"loss": loss.detach(), **reports}


def forward(data_iterator: Any, compute: Any) -> tuple[dict[str, Any], Any]:
    """A micro-batch, and the output of a stage for it."""
    if data_iterator is None:  # a stage in the middle
        return {}, compute(None, None, None)
    batch = next(data_iterator)
    packing = {key: batch[key] for key in ("packed_seq_params",) if key in batch}
    output = compute(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **packing,
    )
    return batch, output


def answers_in(batch: dict[str, Any], losses: torch.Tensor) -> Answers:
    """Sums of a micro-batch by the losses of its next tokens ``[b, s]``. Collective over CP."""
    return answers_of(
        -losses.float(),
        batch["loss_mask"],
        batch["answers"],
        batch["values"],
        batch["references"],
        parallel_state.get_context_parallel_group(),
    )


def with_references(answers: Answers, references: torch.Tensor) -> Answers:
    """Answers with the reference's log-probabilities ``[pairs, 2]``."""
    return replace(answers, references=references)


def reference_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
    """Forward step of the reference model, whose "loss" is the sums of its answers."""
    batch, output = forward(data_iterator, model)

    def sums(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return losses.sum(), answers_in(batch, losses).logps

    return output, sums


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


def reference_of(
    args: argparse.Namespace, model: TrainedModel, provider: ModelProvider
) -> Chunks | None:
    """The reference model of a run, loaded; None where its log-probabilities are not needed."""
    if args.precompute_reference or not PreferenceLoss.from_args(args).needs_reference:
        return None
    if adapted(model.chunks) and args.reference_load is None:
        return partial(_without_adapters, model.chunks)
    return partial(_frozen, frozen_copy(args, provider))


def frozen_copy(args: argparse.Namespace, provider: ModelProvider) -> list[Any]:
    """Stages of the model of ``--reference-load``, without gradients. Collective."""
    config = transformer_config(args)
    modules = build_modules(args, config, provider)
    for module in modules:
        module.requires_grad_(False)
        module.eval()
    source = argparse.Namespace(**vars(args))
    source.load = args.reference_load
    source.finetune = source.exit_on_missing_checkpoint = True
    load(source, BuiltModel(config, modules))
    return modules


@contextmanager
def _without_adapters(chunks: list[Any]) -> Iterator[list[Any]]:
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    with switched_off(chunks):
        yield chunks
    for chunk, mode in zip(chunks, training, strict=True):
        chunk.train(mode)


@contextmanager
def _frozen(chunks: list[Any]) -> Iterator[list[Any]]:
    yield chunks
