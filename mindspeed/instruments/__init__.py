"""Instruments: what a block of code computes, sends, keeps and waits for, counted exactly.

* :class:`FlopCounter`: FLOPs, with and without recomputation.
* :class:`CommLedger`: collectives and their bytes.
* :class:`VirtualClock`: how much communication a schedule hides, by a model of time.
* :func:`saved_for_backward`: bytes that autograd keeps for the backward pass.
* :mod:`~mindspeed.instruments.live_memory`: bytes of all tensors that are alive.
"""

from __future__ import annotations

from mindspeed.instruments.clock import Interval, Link, VirtualClock
from mindspeed.instruments.flops import FlopCount, FlopCounter
from mindspeed.instruments.ledger import CommLedger, Communication
from mindspeed.instruments.saved import SavedTensors, saved_for_backward

__all__ = [
    "CommLedger",
    "Communication",
    "FlopCount",
    "FlopCounter",
    "Interval",
    "Link",
    "SavedTensors",
    "VirtualClock",
    "saved_for_backward",
]
