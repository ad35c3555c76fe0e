"""Imported by a rank server before anything else: torch_npu over the stubs, with CPU kernels.

The two directories come in the environment because the server is a process of its own. The device
itself is not initialised here, so that the processes forked from the server can do it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from tests.npu_emulator.stubs import load_stubs

SITE_PACKAGES = "NPU_EMULATOR_SITE_PACKAGES"
STUBS = "NPU_EMULATOR_STUBS"

load_stubs(Path(os.environ[STUBS]))
sys.path.append(os.environ[SITE_PACKAGES])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of CANN that is not there
    import torch_npu  # noqa: F401

from tests.npu_emulator import atb, aten_ops, collectives, emulation  # noqa: E402
from tests.npu_emulator.reference_ops import REFERENCE  # noqa: E402

emulation.install({**aten_ops.REFERENCE, **REFERENCE})
atb.install()
collectives.install()
