"""Layers that only pass hidden states on, to record what a schedule keeps between its actions.

A bare layer saves its input until backward, as a real one does. Its parameters get gradients if
their reduction begins with the last of them, in backward, and are waited for if their gathers
overlap. What lies between the actions of a schedule, messages and losses, is the same, at a tenth
of the cost.

Megatron's dispatcher of experts has the routing of the last micro-batch as attributes until the
next one, and with it the graph and the gradient of the layer's input; so has a bare layer. The
sizes of an exchange live as long, and as the graph of the layer's output: a bare layer has a byte
of the kind :data:`HELD` for them, for which a real layer says what it is
(:mod:`mindspeed.planner.compose.held`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from mindspeed.built_model import TrainedModel
from mindspeed.instruments.live_memory import LiveMemory

HELD = "held"
"""Kind of the byte that stands for the sizes of an exchange of experts."""


class _Passed(torch.autograd.Function):
    """Copies hidden states and their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        reduced: bool,
        held: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.reduced, ctx.held, ctx.parameters = reduced, held, parameters
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.saved_tensors  # noqa: B018 - released from here on
        made = (torch.empty_like(one) if ctx.reduced else None for one in ctx.parameters)
        return gradient.clone(), None, None, *made


def make_bare(model: TrainedModel, memory: LiveMemory, micro_batches: int | None = None) -> None:
    """Replace what the layers of a model compute.

    Args:
        model: the model.
        memory: counts its bytes.
        micro_batches: in how many micro-batches; default: in all.
    """
    from megatron.core.transformer import TransformerLayer

    for chunk in model.chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                layer.forward = _passing(layer, chunk, memory, micro_batches)  # type: ignore[method-assign]


def _passing(
    layer: Any, chunk: Any, memory: LiveMemory, micro_batches: int | None
) -> Callable[..., Any]:
    from mindspeed.adaptor.moe import moe_layers

    parameters = [one for one in layer.parameters() if one.requires_grad]
    reduced = chunk.ddp_config.overlap_grad_reduce
    inner = [one for one in layer.modules() if one is not layer]
    experts = any(True for _ in moe_layers(layer))
    routed: list[Any] = []  # what the dispatcher has of the last micro-batch
    real, done = layer.forward, [0, 0]  # micro-batches whose forward ran, and again in backward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1
        done[again] += 1
        if micro_batches is not None and done[again] > micro_batches:
            routed.clear()
            return real(hidden_states, *args, **kwargs)
        gathers = chunk.remove_forward_pre_hook_handles
        for module in filter(gathers.__contains__, inner):
            module._forward_pre_hooks[gathers[module].id](module)
        held = None
        if experts:
            before, memory.kind = memory.kind, HELD
            held = torch.empty(1, dtype=torch.uint8, device=hidden_states.device)
            memory.kind = before
            graph = torch.is_grad_enabled() and hidden_states.requires_grad
            routed[:] = [held, get_gradient_edge(hidden_states) if graph else None]
        return _Passed.apply(hidden_states, reduced, held, *parameters), None

    return forward
