"""``fsdp_dtensor`` checkpoints of an fp32 model with SwiGLU cannot be saved.

Megatron stores gate and up projection of a SwiGLU layer separately and looks up the fused parameter
by its name in the state dict with one more ``module.`` in front, which is true of a 16-bit model
(``Float16Module`` hides its own level from the names, not from the modules): an fp32 model ends in
"GPTModel has no attribute `module`". The repair finds parameters by the name below all wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:fsdp-swiglu"


class _BareNames:
    """A wrapped model that finds parameters whatever wrappers their names count."""

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


def find_by_bare_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``handle_swiglu_in_state_dict``."""

    def handle_swiglu_in_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = bind(original, args, kwargs)
        return original(**{**given, "model": _BareNames(given["model"])})

    return handle_swiglu_in_state_dict


PATCHES = (
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
        find_by_bare_name,
        OWNER,
        "fp32 models with SwiGLU are saved by Megatron-FSDP",
        expects="(model, model_state_dict, optimizer_state_dict)",
    ),
)
