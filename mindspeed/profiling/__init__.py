"""Profiling: traces, executed FLOPs, model FLOPs.

* :func:`profile`: a Chrome trace and a table of a window of steps, on chosen ranks.
* :class:`FlopCounter`: FLOPs that a block of code executes, with and without recomputation.
* :func:`model_flops`: FLOPs of the model by formula.
"""

from __future__ import annotations

from mindspeed.instruments import FlopCount, FlopCounter, flops
from mindspeed.profiling.model_flops import ModelShape, model_flops
from mindspeed.profiling.profiler import ProfileOptions, profile

__all__ = [
    "FlopCount",
    "FlopCounter",
    "ModelShape",
    "ProfileOptions",
    "flops",
    "model_flops",
    "profile",
]
