"""Tools for tests of all packages, with the instruments of :mod:`mindspeed.instruments`.

* :class:`RankPool`, :func:`run_ranks`: run a function on N gloo ranks.
* :func:`assert_close_with_grads`: compare outputs and gradients of two implementations.
"""

from __future__ import annotations

from mindspeed.instruments import (
    CommLedger,
    Communication,
    Interval,
    Link,
    SavedTensors,
    VirtualClock,
    saved_for_backward,
)
from mindspeed.testing.compare import assert_close_with_grads
from mindspeed.testing.ranks import RankError, RankPool, run_ranks

__all__ = [
    "CommLedger",
    "Communication",
    "Interval",
    "Link",
    "RankError",
    "RankPool",
    "SavedTensors",
    "VirtualClock",
    "assert_close_with_grads",
    "run_ranks",
    "saved_for_backward",
]
