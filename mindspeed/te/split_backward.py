"""Linear layers and experts whose backward a pipeline schedule divides into I and W.

    seams.chunk.add(partial(split, new_store()), owner=...)

Divided are the linear layers of transformer layers and of multi-token prediction, in both layer
specs: attention (also latent), MLP, experts, shared experts. Undivided are the output layer, whose
output gradient is as large as the logits, embeddings, the router, norms and biases, which are
small, and adapters: their weights' gradients are computed in I, as are those of a layer whose
input needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.memory.stash_swap import StashSwap
from mindspeed.pipeline.schedule.weight_gradients import WeightGradients
from mindspeed.te import local_linears


def new_store(check: Callable[[int, int], None] | None = None) -> WeightGradients:
    """A store whose stashes may wait in host memory.

    Args:
        check: of :class:`StashSwap`.
    """
    return WeightGradients(StashSwap(check=check))


def split(
    store: WeightGradients, model: torch.nn.Module, config: Any, vp_stage: int | None
) -> None:
    """Let the layers of a built model chunk give their weight gradients to ``store``.

    Linear layers of Megatron's own are converted (:mod:`mindspeed.te.local_linears`).
    """
    from megatron.core.transformer.moe.experts import GroupedMLP

    model.weight_gradients = store  # type: ignore[assignment]
    output_layer = getattr(model, "output_layer", None)
    for module in model.modules():
        if module is output_layer:
            continue
        local_linears.convert(module)
        if hasattr(type(module), "weight_gradients") or isinstance(module, GroupedMLP):
            module.weight_gradients = store  # type: ignore[assignment]
