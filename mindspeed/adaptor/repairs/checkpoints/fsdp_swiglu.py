"""Defect: ``fsdp_dtensor`` checkpoints split first layers of MLPs by their names.

Where: ``megatron.core.transformer.fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict`` takes every
first layer for a fused gate and up projection, also in a model that has layers without a gate
(vision and language, Megatron-LM PR 3936), and looks it up by its state-dict name with an
additional ``module.`` prefix. That is correct for a 16-bit model only: ``Float16Module`` omits its
own level from state-dict names but is a module level.
Symptom: silent halves of a weight that has none; "GPTModel has no attribute `module`" for an fp32
model.
Fix: look parameters up by their name below all wrappers, and split those of gated layers only.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:fsdp-swiglu"
NEEDED_WITH = ("use_megatron_fsdp", "swiglu")


class _UnwrappedNames:
    """A wrapped model whose ``get_parameter`` ignores ``module.`` prefixes of the name."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> Any:
        inner = self._model
        while hasattr(inner, "module"):
            inner = inner.module
        while name.startswith("module."):
            name = name.removeprefix("module.")
        return inner.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def split_gated_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``handle_swiglu_in_state_dict``."""

    def handle_swiglu_in_state_dict(
        model: Any, model_state_dict: dict[str, Any], optimizer_state_dict: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        gated, others = _by_gate(model, model_state_dict)
        states = (optimizer_state_dict or {}).get("state", {})
        gated_states, other_states = _by_gate(model, states)
        if optimizer_state_dict is not None:
            optimizer_state_dict = {**optimizer_state_dict, "state": gated_states}
        weights, optimizer = original(_UnwrappedNames(model), gated, optimizer_state_dict)
        if optimizer is not None:
            optimizer = {**optimizer, "state": {**optimizer["state"], **other_states}}
        return {**weights, **others}, optimizer

    return handle_swiglu_in_state_dict


def _by_gate(model: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that may be split, and those below a module without a gate."""
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    gated = {name: value for name, value in state.items() if _has_gate(inner, name)}
    return gated, {name: value for name, value in state.items() if name not in gated}


def _has_gate(module: Any, name: str) -> bool:
    """Whether the innermost configuration on the way to a parameter has a gate."""
    gated = True
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for part in name.split("."):
        config = getattr(module, "config", None)
        gated = getattr(config, "gated_linear_unit", gated)
        module = getattr(module, part, None)
    return gated


PATCHES = (
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
        split_gated_layers,
        OWNER,
        "gate and up projections, and no others, are split in checkpoints of Megatron-FSDP",
        expects="(model, model_state_dict, optimizer_state_dict)",
    ),
)
