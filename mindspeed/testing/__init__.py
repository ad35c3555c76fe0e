"""Instruments for tests and measurements of all packages.

* :class:`RankPool`, :func:`run_ranks`: run a function on N gloo ranks.
* :class:`CommLedger`: count collectives and their bytes.
* :class:`VirtualClock`: how much communication a schedule hides, by a model of time.
* :func:`saved_for_backward`: count the bytes autograd keeps for the backward pass.
* :func:`assert_close_with_grads`: compare outputs and gradients of two implementations.
"""

from __future__ import annotations

from mindspeed.testing.clock import Interval, Link, VirtualClock
from mindspeed.testing.compare import assert_close_with_grads
from mindspeed.testing.ledger import CommLedger, Communication
from mindspeed.testing.ranks import RankError, RankPool, run_ranks
from mindspeed.testing.saved import SavedTensors, saved_for_backward

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
