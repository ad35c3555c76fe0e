"""One accelerator API for NPU, GPU and CPU, and what ``torch.cuda`` means to Megatron on each.

    from mindspeed import device
    here = device.current()                   # MINDSPEED_DEVICE=cpu|cuda|npu, or detected
    x = torch.empty(8, device=here.torch_device())

Library code uses ``current()``, never ``torch.cuda``. Megatron does use ``torch.cuda``, so
:func:`install` maps it to the chosen device: nothing to do on CUDA, torch_npu's transfer layer
(:mod:`mindspeed.device.npu_shim`) on NPU, :mod:`mindspeed.device.torch_cuda_shim` on the CPU.

An installed package adds another kind of device as a class in the entry point group
``mindspeed.devices``; ``MINDSPEED_DEVICE`` selects it by the name of the entry point.
"""

from __future__ import annotations

from mindspeed.device.accelerator import Accelerator
from mindspeed.device.base import CAPABILITIES, Device, MemoryStats, Properties
from mindspeed.device.detect import current, named
from mindspeed.device.determinism import make_deterministic
from mindspeed.device.host_tensors import host_mapped_tensor, host_tensor
from mindspeed.device.torch_cuda_shim.callers import treat_as_megatron
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
    "host_mapped_tensor",
    "host_tensor",
    "install",
    "make_deterministic",
    "named",
    "track_memory",
    "treat_as_megatron",
]


def install(journal: Journal, device: Device | None = None) -> Device:
    """Make Megatron's ``torch.cuda`` calls work on ``device`` (default: :func:`current`).

    Args:
        journal: records every change; ``journal.undo()`` restores the original objects.

    Returns:
        The device that was installed.
    """
    device = device or current()
    device.install(journal)
    return device
