"""Defect: uniform recomputation asks for layers that a stage does not have.

Where: ``megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward``. Each
of its checkpoints runs ``recompute_num_layers`` layers, also the last one of a stage whose layers
are not a multiple of it (Megatron-LM PR 3562).
Symptom: ``--recompute-granularity full --recompute-method uniform --recompute-num-layers N`` ends
in an IndexError in the first forward.
Fix: past its end, a block has layers that return their input.
Versions: 0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:uniform-recompute"


class _NoLayer(SimpleNamespace):
    """A layer that returns its input; ``layer_number`` is that of the last layer."""

    def __call__(self, hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
        return hidden_states, context


def end_with_the_last_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_layer``, which counts the layers of a block from 0."""

    def _get_layer(self: Any, layer_number: int) -> Any:
        if layer_number < self.num_layers_per_pipeline_rank:
            return original(self, layer_number)
        return _NoLayer(layer_number=self.layers[-1].layer_number)

    return _get_layer


PATCHES = (
    Patch(
        "megatron.core.transformer.transformer_block:TransformerBlock._get_layer",
        end_with_the_last_layer,
        OWNER,
        "the last group of recomputed layers may be smaller",
        expects="(self, layer_number)",
        versions=">=0.16,<0.17",
    ),
)
