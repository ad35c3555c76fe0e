"""A command that knows nothing of the emulator sees its NPUs, as on an Ascend machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.npu_emulator.environment import autoloaded
from tests.support.wheels import WheelUnavailable

CHILD = """
import importlib.util
assert importlib.util.find_spec("torch_npu")  # before torch is imported, too
import torch
print((torch.ones(2).npu() + 1).tolist(), torch.npu.device_count())
"""


def test_torch_loads_the_emulated_npu_by_itself(tmp_path):
    try:
        environment = os.environ | autoloaded("elsewhere")
    except WheelUnavailable as reason:
        pytest.skip(f"NPU emulator: {reason}")
    assert environment["PYTHONPATH"].endswith(f"{os.pathsep}elsewhere")
    found = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines()[-1] == "[2.0, 2.0] 8"
