"""Layers that only pass hidden states on, to record what a schedule keeps between its actions.

A bare layer saves its input until backward, and its parameters get gradients, as a real one's do.
What lies between the actions of a schedule, messages and losses, is the same, at a tenth of the
cost.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.built_model import TrainedModel


class _Passed(torch.autograd.Function):
    """Copies hidden states and their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.parameters = parameters
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018 - released from here on
        return gradient.clone(), *(torch.empty_like(one) for one in ctx.parameters)


def make_bare(model: TrainedModel) -> None:
    """Replace what the layers of a model compute."""
    from megatron.core.transformer import TransformerLayer

    for chunk in model.chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                layer.forward = _passing(layer)  # type: ignore[method-assign]


def _passing(layer: Any) -> Any:
    parameters = [one for one in layer.parameters() if one.requires_grad]

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Passed.apply(hidden_states, *parameters), None

    return forward
