"""What a call of ``forward_backward_func`` asks to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.pipeline.schedule.work.recomputation import Recomputation

if TYPE_CHECKING:
    from mindspeed.pipeline.schedule.weights.megatron import MicroBatchWeights


@dataclass(frozen=True)
class StepArguments:
    """The arguments of ``forward_backward_func`` that concern what is computed.

    Attributes:
        forward_step_func: computes one micro-batch.
        readers: a data iterator, or None, for each chunk.
        chunks: this rank's model chunks.
        config: the model's configuration.
        groups: Megatron's ``ProcessGroupCollection`` with tp, cp, pp, embd, pos_embd and dp_cp.
        num_microbatches: of the step.
        forward_only: no backward follows.
        collect_non_loss_data: keep what the loss function returns for ``non_loss_data=True``.
        first_val_step: of fp8 weights: whether this is the first step of a validation.
        force_all_reduce: reduce gradients with an all-reduce in this step.
        recomputations: for each chunk what drops and recomputes its activations, if anything does.
        weights: what each micro-batch counts.
        several_tensors: a stage may return several tensors, some without gradients.
    """

    forward_step_func: Callable[..., Any]
    readers: list[Any]
    chunks: list[Any]
    config: Any
    groups: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool
    recomputations: Sequence[Recomputation | None]
    weights: MicroBatchWeights
    several_tensors: bool = False
