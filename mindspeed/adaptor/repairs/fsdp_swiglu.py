"""Defect: ``fsdp_dtensor`` checkpoints of an fp32 model with SwiGLU cannot be saved.

Where: ``megatron.core.transformer.fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict`` looks up
the fused gate/up parameter by its state-dict name with an additional ``module.`` prefix. That is
correct for a 16-bit model only: ``Float16Module`` omits its own level from state-dict names but is
a module level.
Symptom: "GPTModel has no attribute `module`".
Fix: look parameters up by their name below all wrappers.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:fsdp-swiglu"


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


def find_by_unwrapped_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``handle_swiglu_in_state_dict``."""

    def handle_swiglu_in_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = bind(original, args, kwargs)
        return original(**{**given, "model": _UnwrappedNames(given["model"])})

    return handle_swiglu_in_state_dict


PATCHES = (
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
        find_by_unwrapped_name,
        OWNER,
        "fp32 models with SwiGLU are saved by Megatron-FSDP",
        expects="(model, model_state_dict, optimizer_state_dict)",
    ),
)
