"""The pool of ranks with an emulated NPU, for the fixtures of ``tests/conftest.py``."""

from __future__ import annotations

import pytest

from mindspeed.testing import RankPool
from tests.npu_emulator.stubs import ensure_stubs
from tests.npu_emulator.wheel import ensure_wheel
from tests.support.wheels import WheelUnavailable

PRELOAD = "tests.npu_emulator.preload"


def npu_pool() -> RankPool:
    """A pool whose servers are given ``setup=PRELOAD``, or a module that imports it first."""
    try:
        site_packages = ensure_wheel()
    except WheelUnavailable as reason:
        pytest.skip(f"NPU emulator: {reason}")
    environment = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # preload imports torch_npu itself, after the stubs
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # the allocator warns of a CANN it does not know
        # Copies of torch_npu's own, such as those of resize_, would run in its queue's thread, and
        # our kernels, which run at once, would read memory before it is written.
        "TASK_QUEUE_ENABLE": "0",
        "MINDSPEED_DEVICE": "npu",
        "NPU_EMULATOR_SITE_PACKAGES": str(site_packages),
        "NPU_EMULATOR_STUBS": str(ensure_stubs(site_packages)),
    }
    return RankPool(environment)
