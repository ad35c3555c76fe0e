"""Which weights of some experts an anchor takes."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def taken(delayed: bool = False, divided: bool | None = None) -> tuple[list[str], bool, bool]:
    """Names of the weights; whether the layer has the anchor inside, and behind the context.

    Args:
        delayed: Weight gradients are computed in ``backward_dw``.
        divided: There is a store, and a pipeline schedule divides the backward or not.
    """
    from mindspeed.te.grouped import GroupedLinear
    from mindspeed.te.local_linears import anchored, anchored_weights

    layer = GroupedLinear(2, 4, 6, delay_wgrad_compute=delayed)
    if divided is not None:
        layer.weight_gradients = SimpleNamespace(splitting_backward=divided)
    experts = torch.nn.Sequential(layer, torch.nn.Linear(6, 6))
    found = {id(weight) for weight in anchored_weights(experts)}
    with anchored(experts, SimpleNamespace()):
        inside = layer.gradient_anchor is not None
    names = [name for name, weight in experts.named_parameters() if id(weight) in found]
    return names, inside, layer.gradient_anchor is not None
