"""Imported once by the server of ranks that train: the emulated NPU first, then the suite."""

# ruff: noqa: F401
import tests.npu_emulator.preload
import tests.support.warm
