"""The original's import path of :mod:`mindspeed.adaptor.context_parallel.ulysses`."""

from mindspeed.adaptor.context_parallel.ulysses import (
    DefaultGatherSizeCalculator,
    DynamicGatherSizeCalculator,
    GatherSizeCalculator,
    UlyssesContextAttention,
    ulyssesattn_context_parallel,
)

__all__ = [
    "DefaultGatherSizeCalculator",
    "DynamicGatherSizeCalculator",
    "GatherSizeCalculator",
    "UlyssesContextAttention",
    "ulyssesattn_context_parallel",
]
