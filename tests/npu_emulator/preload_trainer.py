"""Imported once by the server of ranks that train: the emulated NPU first, then the suite."""

import tests.npu_emulator.preload
import tests.support.warm  # noqa: F401
