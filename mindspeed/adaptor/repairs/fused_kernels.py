"""Megatron-LM's legacy fused CUDA kernels cannot be compiled without CUDA.

``initialize_megatron`` asks ``nvcc`` for its version before anything else; on a machine without
CUDA that is an exception in every training script. Nothing of megatron.core uses these kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:fused-kernels"


def load_nothing(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replace ``load`` by a function that compiles nothing."""

    def load(args: Any) -> None:
        del args

    return load


PATCHES = (
    Patch(
        "megatron.legacy.fused_kernels:load",
        load_nothing,
        OWNER,
        "no CUDA kernels to compile on this device",
        kind="replace",
        expects="(args)",
    ),
)
