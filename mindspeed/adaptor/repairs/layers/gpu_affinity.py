"""Defect: fine-grained activation offloading requires NVIDIA's Python packages on every device.

Where: ``megatron.core.pipeline_parallel.utils.set_ideal_affinity_for_current_gpu``, called by
Megatron-LM's script with ``--fine-grained-activation-offloading``, queries ``cuda-python`` and
``pynvml`` for the CPU cores closest to the GPU.
Symptom: an ImportError on other devices.
Fix: set the CPU affinity on CUDA only.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed import device
from mindspeed.adaptor.patch import Patch

OWNER = "repair:gpu-affinity"
NEEDED_WITH = ("fine_grained_activation_offloading",)


def only_on_cuda(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``set_ideal_affinity_for_current_gpu``."""

    def set_ideal_affinity_for_current_gpu() -> None:
        if device.current().name == "cuda":
            original()

    return set_ideal_affinity_for_current_gpu


PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
        only_on_cuda,
        OWNER,
        "CPU affinity to the GPU is set on CUDA only",
        expects="()",
        versions=">=0.16",
    ),
)
