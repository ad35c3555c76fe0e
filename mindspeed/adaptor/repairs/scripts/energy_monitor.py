"""Defect: NVML is asked for the energy of no device.

Where: ``EnergyMonitor._get_energy`` of ``megatron.core.energy_monitor``. Training pauses and
resumes the monitor around checkpoints and evaluation wherever ``pynvml`` is installed, and gets a
device's handle with ``--log-energy`` only (Megatron-LM PR 1871).
Symptom: the process can crash in NVIDIA's library when a checkpoint is saved.
Fix: a monitor without a device asks nobody.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch

OWNER = "repair:energy-monitor"


def of_a_device(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``EnergyMonitor._get_energy``."""

    def _get_energy(self: Any) -> int:
        last: int = self._last_energy
        return last if self._handle is None else original(self)

    return _get_energy


PATCHES = (
    Patch(
        "megatron.core.energy_monitor:EnergyMonitor._get_energy",
        of_a_device,
        OWNER,
        "the energy monitor asks NVML about a device only",
        expects="(self)",
    ),
)
