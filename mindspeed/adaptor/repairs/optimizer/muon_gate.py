"""Defect: Muon splits the weight of queries, keys and values as if attention had no output gate.

Where: ``megatron.core.optimizer.muon.get_megatron_muon_optimizer`` takes three parts a group;
``--attention-output-gate`` adds a fourth between queries and keys (Megatron-LM PR 4728).
Symptom: the wrong rows are made orthogonal together, silently where the number of rows can be
divided by three parts, else an error in ``view``.
Fix: four parts.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:muon-gate"


def needed(values: Mapping[str, Any]) -> bool:
    """Whether Muon updates weights with an output gate."""
    return bool(values.get("attention_output_gate")) and "muon" in str(values.get("optimizer"))


def split_off_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_muon_optimizer``."""

    def get_megatron_muon_optimizer(*args: Any, **kwargs: Any) -> Any:
        chained = original(*args, **kwargs)
        (*_, chunk) = bind(original, args, kwargs)["model_chunks"]
        if chunk.config.attention_output_gate:
            for wrapper in chained.chained_optimizers:
                optimizer = wrapper.optimizer
                if shapes := getattr(optimizer, "qkv_split_shapes", None):
                    optimizer.qkv_split_shapes = [shapes[0], *shapes]
        return chained

    return get_megatron_muon_optimizer


PATCHES = (
    Patch(
        "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        split_off_gate,
        OWNER,
        "Muon knows the gate of attention outputs as a matrix of its own",
        expects="(config, model_chunks, ...)",
        versions=">=0.16,<0.17",
    ),
)
