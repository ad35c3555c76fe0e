"""Forward pass and loss of one micro-batch: the default, and what a user's own must return.

A forward step has Megatron-LM's contract:

    forward_step(data_iterator, model) -> (output tensor, loss function)
    loss function(output tensor)       -> (loss, num_tokens, reports)  or  (loss, reports)

``loss`` is a scalar: a sum over ``num_tokens`` tokens, or in the second form a mean over the
micro-batch. ``reports`` maps the names of the log line to tensors of two elements, a sum and its
count, or of one, a mean. Megatron's schedules call the function once per micro-batch and stage, and
the loss function on the last stage only.

``data_iterator`` yields dicts: ``tokens``, ``labels``, ``position_ids`` of int64 [b, s],
``loss_mask`` of fp32 [b, s], ``attention_mask`` (None: the attention knows its mask), and
``packed_seq_params`` with packed documents. Tensors that a stage does not need are None; so is the
iterator itself on stages that need nothing.

A forward step may have a method ``before``, called before each step with all its data
(:class:`mindspeed.training.step.Trainer`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mindspeed.adaptor.versions.trainer import counted_tokens
from mindspeed.errors import ConfigError, TrainingError
from mindspeed.flags import read


@dataclass(frozen=True)
class _ScheduleFlags:
    """Megatron's flags that a forward step has to fit."""

    calculate_per_token_loss: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None


# Flags whose schedules call the forward step with one more argument.
_PARAMETERS = {
    "overlap_moe_expert_parallel_comm": (
        "return_schedule_plan",
        "for which it returns model.build_schedule_plan(...) as output",
    ),
    "num_microbatches_with_partial_activation_checkpoints": (
        "checkpoint_activations_microbatch",
        "which says whether the model recomputes this micro-batch",
    ),
}

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]
Reports = dict[str, torch.Tensor]


def forward_step(
    data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """The default: next-token prediction with a GPT.

    Args:
        data_iterator: micro-batches, or None.
        model: one chunk.
        return_schedule_plan: return the pass as a plan whose parts the schedule runs between those
            of another micro-batch (``--overlap-moe-expert-parallel-comm``).
    """
    compute = model.build_schedule_plan if return_schedule_plan else model
    if data_iterator is None:  # a stage in the middle; its loss function is never called
        return compute(None, None, None), next_token_loss
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
    # Without a mask the stage is not the last one and its loss function is never called.
    return output, partial(next_token_loss, batch["loss_mask"])


def next_token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Reports]:
    """Sum over the tokens that count.

    Args:
        loss_mask: [b, s], fp32: 1 for tokens that count.
        losses: [b, s], any floating dtype: the loss of each token.

    Returns:
        Sum of the losses (scalar, fp32), number of tokens (scalar, int32) and both as the report
        ``lm loss`` ([2], fp32).
    """
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


@dataclass(frozen=True)
class MicroBatchLoss:
    """Results of the loss function for one micro-batch, detached.

    Attributes:
        loss: scalar: a sum over ``num_tokens`` tokens, or a mean.
        num_tokens: scalar, integer; None where ``loss`` is a mean.
        reports: name -> [2], fp32: a sum and its count; a mean counts as one.
        means: names of the reports that are means.
    """

    loss: torch.Tensor
    num_tokens: torch.Tensor | None
    reports: Reports
    means: frozenset[str] = frozenset()

    def weighted(self, weight: float) -> MicroBatchLoss:
        """The loss with means that count ``weight`` times: micro-batches of different sizes."""
        scaled = {name: self.reports[name] * weight for name in self.means}
        return replace(self, reports={**self.reports, **scaled})


def checked(forward_step: ForwardStep, args: Any, reserved: Collection[str]) -> ForwardStep:
    """``forward_step`` with its returns checked; the schedule collects :class:`MicroBatchLoss`.

    Args:
        forward_step: a user's function or the default.
        args: final values.
        reserved: names that reports cannot have.

    Raises:
        ConfigError: the function lacks a parameter that the flags need.
    """
    flags = read(_ScheduleFlags, args)
    for flag, (parameter, use) in _PARAMETERS.items():
        if getattr(flags, flag) and not _takes(forward_step, parameter):
            raise ConfigError(
                f"--{flag.replace('_', '-')} needs a forward_step with the parameter {parameter}, "
                f"{use}"
            )

    per_token = flags.calculate_per_token_loss

    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        returned = forward_step(data_iterator, model, *args, **kwargs)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            raise TrainingError(
                "forward_step must return a pair (output tensor, loss function), not "
                f"{_described(returned)}"
            )
        output, loss_function = returned

        def compute_loss(output: Any) -> tuple[Any, ...]:
            returned = loss_function(output)
            if problem := _problem(returned, per_token, reserved):
                raise TrainingError(f"the loss function of forward_step {problem}")
            loss, *num_tokens, reports = returned
            # A copy: the schedule divides the loss in place.
            collected = MicroBatchLoss(
                loss.detach().clone().view(()),
                num_tokens[0].view(()) if num_tokens else None,
                {name: _sum_and_count(value) for name, value in reports.items()},
                frozenset(name for name, value in reports.items() if value.numel() == 1),
            )
            counts = [counted_tokens(count, per_token) for count in num_tokens]
            return (loss, *counts, collected)

        return output, compute_loss

    return step


def sum_reports(losses: Sequence[MicroBatchLoss]) -> Reports:
    """Reports of one step on this rank: name -> ``[2]``, fp32.

    Raises:
        TrainingError: the micro-batches have reports of different names.
    """
    names = list(losses[0].reports) if losses else []
    for index, micro_batch in enumerate(losses):
        if set(micro_batch.reports) != set(names):
            raise TrainingError(
                f"the loss function of forward_step reports {sorted(names)} for micro-batch 0 and "
                f"{sorted(micro_batch.reports)} for micro-batch {index}: the names must be equal"
            )
    return {name: torch.stack([m.reports[name] for m in losses]).sum(dim=0) for name in names}


def first_not_finite(losses: Sequence[MicroBatchLoss]) -> int | None:
    """Index of the first micro-batch whose loss is not finite; one copy to the host."""
    if not losses:
        return None
    finite = torch.isfinite(torch.stack([micro_batch.loss for micro_batch in losses]))
    return None if finite.all() else int(torch.nonzero(~finite)[0])


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _sum_and_count(value: torch.Tensor) -> torch.Tensor:
    flat = value.detach().reshape(-1).float()
    return torch.cat([flat, torch.ones_like(flat)]) if flat.numel() == 1 else flat.clone()


def _problem(returned: Any, per_token: bool, reserved: Collection[str]) -> str | None:
    """Why a loss function cannot have returned this; None if it can."""
    if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
        return (
            "must return (loss, num_tokens, reports) or (loss, reports), not "
            f"{_described(returned)}"
        )
    loss, *num_tokens, reports = returned
    if not _is_tensor(loss, 1) or not loss.is_floating_point():
        return f"must return a scalar tensor as loss, not {_described(loss)}"
    if torch.is_grad_enabled() and not loss.requires_grad:
        return "returned a loss without a gradient: compute it from the output tensor"
    if num_tokens and (not _is_tensor(num_tokens[0], 1) or num_tokens[0].is_floating_point()):
        return (
            f"must return num_tokens as an integer scalar tensor, not {_described(num_tokens[0])}"
        )
    if per_token and not num_tokens:
        return "must return (loss, num_tokens, reports) with --calculate-per-token-loss"
    if not isinstance(reports, Mapping):
        return f"must return its reports as a dict, not {_described(reports)}"
    for name, value in reports.items():
        if not isinstance(name, str):
            return f"must name its reports by str, not {_described(name)}"
        if name in reserved:
            return f"cannot report {name!r}: the log has a value of this name already"
        if not _is_tensor(value, 1) and not _is_tensor(value, 2):
            return (
                f"must report {name!r} as a tensor of one element (a mean) or two (a sum and its "
                f"count), not {_described(value)}"
            )
    return None


def _is_tensor(value: Any, elements: int) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == elements


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__
