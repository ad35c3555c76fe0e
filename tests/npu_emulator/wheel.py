"""The torch_npu wheel, which only the emulator puts on a path.

torch loads an installed torch_npu by itself and fails when CANN is missing, so the wheel must never
reach an ordinary environment.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support import wheels
from tests.support.wheels import WheelUnavailable

VERSION = "2.13.0"


def cache_directory() -> Path:
    """Where this interpreter's copy of the wheel and its stubs live."""
    return wheels.cache_directory("torch_npu", VERSION)


def ensure_wheel() -> Path:
    """The directory that holds the package torch_npu, installed when it is not there yet.

    Raises:
        WheelUnavailable: this torch is not the wheel's, or pip cannot install it.
    """
    if torch.__version__.partition("+")[0] != VERSION:
        raise WheelUnavailable(
            f"torch_npu {VERSION} needs torch {VERSION}, this is {torch.__version__}"
        )
    return wheels.ensure_wheel("torch_npu", VERSION)
