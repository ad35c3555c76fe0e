"""Which experts give their weight gradients to an anchor (:mod:`mindspeed.moe.anchor`).

    te.GroupedLinear, te.Linear                grouped and sequential experts of the TE spec
    GroupedMLP                                 grouped experts of the local spec
    Column- and RowParallelLinear, converted   sequential experts (:func:`convert_experts`)

Not while a pipeline schedule divides the backward, and not where weight gradients are delayed: both
compute them elsewhere. Gradients of biases and adapters are computed with those of the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed.te import local_linears
from mindspeed.te.weight_gradient import GradientAnchor


def convert_experts(experts: torch.nn.Module) -> None:
    """Let linear layers of Megatron's own compute by :mod:`mindspeed.te.local_linears`."""
    for module in experts.modules():
        local_linears.convert(module)


def anchored_weights(experts: torch.nn.Module) -> list[torch.Tensor]:
    """The weights, frozen ones too, whose gradients an anchor can take now."""
    return [
        parameter
        for module in _takers(experts)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    ]


@contextlib.contextmanager
def anchored(experts: torch.nn.Module, anchor: GradientAnchor | None) -> Iterator[None]:
    """Give the weight gradients of the calls inside to ``anchor``.

    Args:
        experts: Their linear layers are found.
        anchor: None changes nothing.
    """
    layers = [] if anchor is None else list(_takers(experts))
    for layer in layers:
        layer.gradient_anchor = anchor
    try:
        yield
    finally:
        for layer in layers:
            del layer.gradient_anchor


def _takers(experts: torch.nn.Module) -> Iterator[Any]:
    from megatron.core.transformer.moe.experts import GroupedMLP

    for module in experts.modules():
        if hasattr(type(module), "gradient_anchor") or isinstance(module, GroupedMLP):
            store = getattr(module, "weight_gradients", None)
            delayed = getattr(module, "_delayed", None) is not None
            if not delayed and (store is None or not store.splitting_backward):
                yield module
