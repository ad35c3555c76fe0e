"""Layers that only pass hidden states on, to record what a schedule keeps between its actions.

A bare layer saves its input until backward, as a real one does. Its parameters get gradients if
their reduction begins with the last of them, in backward, and are waited for if their gathers
overlap. What lies between the actions of a schedule, messages and losses, is the same, at a tenth
of the cost.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.built_model import TrainedModel


class _Passed(torch.autograd.Function):
    """Copies hidden states and their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, reduced: bool, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.reduced, ctx.parameters = reduced, parameters
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018 - released from here on
        made = (torch.empty_like(one) if ctx.reduced else None for one in ctx.parameters)
        return gradient.clone(), None, *made


def make_bare(model: TrainedModel) -> None:
    """Replace what the layers of a model compute."""
    from megatron.core.transformer import TransformerLayer

    for chunk in model.chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                layer.forward = _passing(layer, chunk)  # type: ignore[method-assign]


def _passing(layer: Any, chunk: Any) -> Any:
    parameters = [one for one in layer.parameters() if one.requires_grad]
    reduced = chunk.ddp_config.overlap_grad_reduce
    inner = [one for one in layer.modules() if one is not layer]

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathers = chunk.remove_forward_pre_hook_handles
        for module in filter(gathers.__contains__, inner):
            module._forward_pre_hooks[gathers[module].id](module)
        return _Passed.apply(hidden_states, reduced, *parameters), None

    return forward
