"""On the path of a command that sees emulated NPUs: torch finds the entry point here.

An installed torch_npu is loaded by ``import torch`` in the same way.
"""


def load() -> None:
    """Load the emulated NPU, at the end of ``import torch``."""
    import tests.npu_emulator.preload  # noqa: F401
