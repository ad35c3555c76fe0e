"""Imported once by the server of ranks that install the device layer.

torch_npu's transfer layer imports peft, with it transformers, and torch's inductor: four seconds of
processor time for each rank.
"""

import contextlib

import tests.npu_emulator.preload  # noqa: F401

with contextlib.suppress(ImportError):
    import peft  # noqa: F401
import torch._inductor.compile_fx  # noqa: F401
