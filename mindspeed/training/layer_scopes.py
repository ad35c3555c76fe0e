"""Hooks that set ``clock.scope`` to the layer that runs, forward, again or backward.

The backward of a layer begins when the gradient of its output is complete, and ends when that of
its input is.
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.instruments.clock import VirtualClock


def layer_hooks(clock: VirtualClock, layer: Any, scope: str, outside: str) -> list[Any]:
    """Hooks of a transformer layer; returns their handles.

    Args:
        clock: whose scope is set.
        layer: a ``TransformerLayer``.
        scope: while it runs.
        outside: after it, and before the backward of the last layer.
    """

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if not getattr(hidden, "_layer_output", False):
            when_gradient_is_known(clock, hidden, outside)
        clock.scope = scope

    def leave(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        when_gradient_is_known(clock, hidden, scope)
        hidden._layer_output = True
        clock.scope = outside

    return [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]


def when_gradient_is_known(clock: VirtualClock, tensor: Any, scope: str) -> None:
    """Set the scope in backward as soon as the gradient of ``tensor`` is complete."""

    def hook(gradient: torch.Tensor) -> None:
        clock.scope = scope

    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(hook)
