"""The pool of ranks with an emulated NPU, for the fixtures of ``tests/conftest.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed.testing import RankPool
from tests.npu_emulator.environment import environment
from tests.support.wheels import WheelUnavailable

PRELOAD = "tests.npu_emulator.preload"


def npu_pool(shared: Path) -> RankPool:
    """A pool whose servers are given ``setup=PRELOAD``, or a module that imports it first."""
    try:
        return RankPool(environment(), shared)
    except WheelUnavailable as reason:
        pytest.skip(f"NPU emulator: {reason}")
