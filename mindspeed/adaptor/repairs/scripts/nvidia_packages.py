"""Defects of calls of NVIDIA's Python packages.

Defect: fine-grained activation offloading requires NVIDIA's Python packages on every device.

Where: ``megatron.core.pipeline_parallel.utils.set_ideal_affinity_for_current_gpu``, called by
Megatron-LM's script with ``--fine-grained-activation-offloading``, queries ``cuda-python`` and
``pynvml`` for the CPU cores closest to the GPU.
Symptom: an ImportError on other devices.
Fix: set the CPU affinity on CUDA only.
Versions: >=0.16.

Defect: NVML is asked for the energy of no device.

Where: ``EnergyMonitor._get_energy`` of ``megatron.core.energy_monitor``. Training pauses and
resumes the monitor around checkpoints and evaluation wherever ``pynvml`` is installed, and gets a
device's handle with ``--log-energy`` only (Megatron-LM PR 1871).
Symptom: the process can crash in NVIDIA's library when a checkpoint is saved.
Fix: a monitor without a device asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed import device
from mindspeed.adaptor.patch import repair


def only_on_cuda(original: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``set_ideal_affinity_for_current_gpu``."""

    def set_ideal_affinity_for_current_gpu() -> None:
        if device.current().name == "cuda":
            original()

    return set_ideal_affinity_for_current_gpu


def of_a_device(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``EnergyMonitor._get_energy``."""

    def _get_energy(self: Any) -> int:
        last: int = self._last_energy
        return last if self._handle is None else original(self)

    return _get_energy


PATCHES = (
    repair(
        "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
        only_on_cuda,
        "CPU affinity to the GPU is set on CUDA only",
        expects="()",
        versions=">=0.16",
    ),
    repair(
        "megatron.core.energy_monitor:EnergyMonitor._get_energy",
        of_a_device,
        "the energy monitor asks NVML about a device only",
        expects="(self)",
        versions=">=0.15",
    ),
)
