"""Defect: Megatron-LM compiles its legacy fused CUDA kernels on every device.

Where: ``megatron.legacy.fused_kernels.load``, called first by ``initialize_megatron``, runs
``nvcc`` to read its version.
Symptom: an exception in every training script on a machine without CUDA.
Fix: ``load`` compiles nothing; no code of megatron.core uses these kernels.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.device import Device

OWNER = "repair:fused-kernels"


def needed_on(device: Device, te: str) -> bool:
    """Whether CUDA kernels are missing."""
    return device.name != "cuda"


def skip_compilation(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Replace ``load`` by a function that compiles nothing."""

    def load(args: Any) -> None:
        del args

    return load


PATCHES = (
    Patch(
        "megatron.legacy.fused_kernels:load",
        skip_compilation,
        OWNER,
        "no CUDA kernels are compiled on this device",
        kind="replace",
        expects="(args)",
    ),
)
