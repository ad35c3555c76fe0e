"""Instruments: what a block of code computes, sends, keeps and waits for, counted exactly.

* :class:`FlopCounter`: FLOPs, with and without recomputation.
* :class:`CommLedger`: collectives and their bytes.
* :class:`VirtualClock`: how much communication a schedule hides, by a model of time.
* :func:`saved_for_backward`: bytes that autograd keeps for the backward pass.
* :class:`Timeline`: intervals on lanes, as text, trace and picture.
* :mod:`~mindspeed.instruments.live_memory`: bytes of all tensors that are alive.
"""

from __future__ import annotations

from mindspeed.instruments.clock import Link, TimedCall, VirtualClock
from mindspeed.instruments.flops import FlopCount, FlopCounter
from mindspeed.instruments.ledger import CommLedger, Communication
from mindspeed.instruments.saved import SavedTensors, saved_for_backward
from mindspeed.instruments.timeline import Interval, Timeline

__all__ = [
    "CommLedger",
    "Communication",
    "FlopCount",
    "FlopCounter",
    "Interval",
    "Link",
    "SavedTensors",
    "TimedCall",
    "Timeline",
    "VirtualClock",
    "saved_for_backward",
]
