"""Which part of a step runs: the layers of each model chunk, gradients of all, the optimizer.

While a block of :func:`parts_named` runs, ``clock.scope`` is

* ``chunk 0, layer 3``: a transformer layer, forward, again or backward. The backward of a layer
  begins when the gradient of its output is complete, and ends when that of its input is;
* ``chunk 0``: the rest of a chunk: embedding, final norm, output layer, loss;
* :data:`GRADIENTS`: reductions after the last backward;
* :data:`OPTIMIZER`: its step, with the gather of parameters that follows;
* ``""``: before the first chunk runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)

# isort: split
import torch
from megatron.core.transformer import TransformerLayer

from mindspeed.built_model import TrainedModel
from mindspeed.instruments.clock import VirtualClock
from mindspeed.journal import Journal

GRADIENTS, OPTIMIZER = "gradients", "optimizer"


def chunk_of(scope: str) -> int | None:
    """Index of the chunk that a scope belongs to; None: to none."""
    name = scope.partition(",")[0]
    return int(name.removeprefix("chunk ")) if name.startswith("chunk ") else None


def named_layers(chunk: torch.nn.Module, index: int) -> Iterator[tuple[str, TransformerLayer]]:
    """The transformer layers of the chunk with this index, and their scopes."""
    for name, module in chunk.named_modules():
        if isinstance(module, TransformerLayer):
            kind = "prediction layer" if ".mtp." in name else "layer"
            yield f"chunk {index}, {kind} {module.layer_number}", module


@contextmanager
def parts_named(clock: VirtualClock, model: TrainedModel) -> Iterator[None]:
    """Set ``clock.scope`` while steps of the model run."""
    journal, handles = Journal(), []
    try:
        for index, chunk in enumerate(model.chunks):
            handles += _chunk_hooks(clock, chunk, f"chunk {index}")
            for scope, module in named_layers(chunk, index):
                handles += _layer_hooks(clock, module, scope, f"chunk {index}")
        config = model.chunks[0].config
        for holder, name, scope in (
            (config, "finalize_model_grads_func", GRADIENTS),
            (model.optimizer, "step", OPTIMIZER),
        ):
            if getattr(holder, name, None) is not None:
                journal.set(
                    holder, name, _within(clock, getattr(holder, name), scope), owner="scopes"
                )
        yield
    finally:
        journal.undo()
        for handle in handles:
            handle.remove()


def _within(clock: VirtualClock, run: Callable[..., Any], scope: str) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        clock.scope = scope
        return run(*args, **kwargs)

    return wrapped


def _chunk_hooks(clock: VirtualClock, chunk: Any, scope: str) -> list[Any]:
    def enter(module: Any, args: Any) -> None:
        clock.scope = scope

    def leave(module: Any, args: Any, output: Any) -> None:
        clock.scope = scope
        if not getattr(output, "_layer_output", False):  # a chunk that ends with a layer
            _when_gradient_is_known(clock, output, scope)

    return [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]


def _layer_hooks(clock: VirtualClock, layer: Any, scope: str, outside: str) -> list[Any]:
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
            _when_gradient_is_known(clock, hidden, outside)
        clock.scope = scope

    def leave(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        _when_gradient_is_known(clock, hidden, scope)
        hidden._layer_output = True
        clock.scope = outside

    return [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
    ]


def _when_gradient_is_known(clock: VirtualClock, tensor: Any, scope: str) -> None:
    """Set the scope in backward as soon as the gradient of ``tensor`` is complete."""

    def hook(gradient: torch.Tensor) -> None:
        clock.scope = scope

    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(hook)
