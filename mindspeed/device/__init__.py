"""One accelerator API for NPU, GPU and CPU, and Megatron's torch.cuda-shaped world on each of them.

    from mindspeed import device
    here = device.current()                   # MINDSPEED_DEVICE=cpu|cuda|npu, or detected
    x = torch.empty(8, device=here.torch_device())

Library code asks ``current()``; it never names torch.cuda. Megatron does name it, so
:func:`install` makes those names mean the chosen device: nothing on CUDA, torch_npu's own transfer
layer on NPU, :mod:`mindspeed.device.cuda_world` on the CPU.

Another kind of device is a class that an installed package names under the entry point group
``mindspeed.devices``; ``MINDSPEED_DEVICE`` selects it by the name of the entry point.
"""

from __future__ import annotations

from mindspeed.device.accelerator import Accelerator
from mindspeed.device.base import CAPABILITIES, Device, MemoryStats, Properties
from mindspeed.device.cuda_world.callers import treat_as_megatron
from mindspeed.device.detect import current, named
from mindspeed.device.determinism import make_deterministic
from mindspeed.device.tracker import MemoryTracker, track_memory
from mindspeed.journal import Journal

__all__ = [
    "CAPABILITIES",
    "Accelerator",
    "Device",
    "MemoryStats",
    "MemoryTracker",
    "Properties",
    "current",
    "install",
    "make_deterministic",
    "named",
    "track_memory",
    "treat_as_megatron",
]


def install(journal: Journal, device: Device | None = None) -> Device:
    """Make Megatron's torch.cuda calls work on ``device`` (default: :func:`current`).

    Args:
        journal: records every change; ``journal.undo()`` restores the original objects.
        device: the device to install for.

    Returns:
        The device that was installed.
    """
    device = device or current()
    device.install(journal)
    return device
