"""Offloading of single modules binds the process to the processors next to its GPU.

``--fine-grained-activation-offloading`` in Megatron-LM's script asks ``cuda-python`` and ``pynvml``
which processors these are, and stops without them. There is no GPU to be close to on other
devices.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed import device
from mindspeed.adaptor.patch import Patch

OWNER = "repair:gpu-affinity"


def only_for_gpus(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``set_ideal_affinity_for_current_gpu``."""

    def set_ideal_affinity_for_current_gpu() -> None:
        if device.current().name == "cuda":
            original()

    return set_ideal_affinity_for_current_gpu


PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
        only_for_gpus,
        OWNER,
        "there is no GPU to be close to",
        expects="()",
        versions=">=0.16",
    ),
)
