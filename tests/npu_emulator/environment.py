"""Environment variables of processes that see the emulated NPU."""

from __future__ import annotations

import os
from pathlib import Path

from tests.npu_emulator.stubs import ensure_stubs
from tests.npu_emulator.wheel import ensure_wheel


def environment() -> dict[str, str]:
    """For processes that import ``tests.npu_emulator.preload`` by themselves.

    Raises:
        WheelUnavailable: torch_npu cannot be had here.
    """
    site_packages = ensure_wheel()
    return {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # preload imports torch_npu itself, after the stubs
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the allocator warns of a CANN it does not know
        # Copies of torch_npu's own, such as those of resize_, would run in its queue's thread, and
        # our kernels, which run at once, would read memory before it is written.
        "TASK_QUEUE_ENABLE": "0",
        "MINDSPEED_DEVICE": "npu",
        "NPU_EMULATOR_SITE_PACKAGES": str(site_packages),
        "NPU_EMULATOR_STUBS": str(ensure_stubs(site_packages)),
    }


def autoloaded(path: str) -> dict[str, str]:
    """The same for processes that know nothing of the emulator: ``import torch`` loads it.

    Args:
        path: ``PYTHONPATH`` until now.
    """
    here = Path(__file__).resolve().parent
    found = environment()
    # torch_npu is on the path, as an installed one is, since transformers looks for it by name.
    added = [str(here.parents[1]), str(here / "autoload"), found["NPU_EMULATOR_SITE_PACKAGES"]]
    found["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    return found | {"PYTHONPATH": os.pathsep.join([*added, *filter(None, [path])])}
