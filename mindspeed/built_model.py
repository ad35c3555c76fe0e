"""A model as this rank has it: module chunks, and in training their optimizer and schedule.

Training makes these objects; checkpoints, adapters and generation take them. A chunk is one virtual
pipeline stage, as in Megatron's ``model`` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig


@dataclass
class BuiltModel:
    """A model with weights.

    Attributes:
        config: Megatron's configuration of its transformer.
        chunks: One module per virtual pipeline stage of this rank, wrapped or not.
    """

    config: TransformerConfig
    chunks: list[Any]

    @property
    def modules(self) -> list[Any]:
        """The chunks without data-parallel and precision wrappers."""
        return unwrap(self.chunks)


@dataclass
class TrainedModel(BuiltModel):
    """A model that a training step changes.

    Attributes:
        optimizer: Of all chunks.
        schedule: Learning rate and weight decay.
    """

    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


def unwrap(chunks: Iterable[Any]) -> list[Any]:
    """The chunks without data-parallel and precision wrappers."""
    return [_innermost(chunk) for chunk in chunks]


def _innermost(chunk: Any) -> Any:
    while not hasattr(chunk, "decoder") and isinstance(
        inner := getattr(chunk, "module", None), torch.nn.Module
    ):
        chunk = inner
    return chunk
