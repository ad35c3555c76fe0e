"""Replacement of the forward of mixture-of-experts layers by a feature: on the instances.

    def attach(seams, options, megatron):
        def replace(model, config, vp_stage):
            for layer in moe_layers(model):
                replace_forward(layer, lambda forward: overlapped(forward, options), seams.journal)

        seams.chunk.add(replace, owner=self.name)

The seam ``chunk`` gets the finished modules, so both layer specs and multi-token prediction are
reached, no class is patched, and detaching the feature restores the layers that are still alive.
``--overlap-moe-expert-parallel-comm`` does not call ``forward``: its schedule runs router,
dispatcher and experts of a layer one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.journal import replace_method

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from mindspeed.journal import Journal


def moe_layers(model: torch.nn.Module) -> Iterator[MoELayer]:
    """The mixture-of-experts layers of a model chunk, multi-token prediction's included."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return (module for module in model.modules() if isinstance(module, MoELayer))


def replace_forward(
    module: torch.nn.Module,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    journal: Journal,
) -> None:
    """Replace ``forward`` of one module until ``journal`` is undone. Replacements stack.

    The journal does not keep the module alive.

    Args:
        module: Any module; hooks and recomputation call its ``forward`` as before.
        make: Gets the ``forward`` that there is, returns the new one.
        journal: A feature's ``seams.journal``.
    """
    replace_method(module, "forward", make, journal)
