"""Robust times of short pieces of work: medians with their spread.

A sample is a loop that is long against the resolution of the clock; warm-up runs are thrown away.
The median of some samples counts, and the distance of their quartiles says how far to trust it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles

WARM_UP, MOST_LOOPS = 2, 1000


@dataclass(frozen=True)
class Timing:
    """Seconds of one run.

    Attributes:
        seconds: median.
        spread: interquartile range as a part of the median.
    """

    seconds: float
    spread: float


@dataclass(frozen=True)
class Stopwatch:
    """Takes times of work on a device.

    Attributes:
        synchronize: waits until the device has done what was started.
        samples: number of them.
        seconds: that a sample lasts at least.
        agree: gives all ranks that take part the same number of runs.
        now: the clock.
    """

    synchronize: Callable[[], None]
    samples: int = 7
    seconds: float = 0.01
    agree: Callable[[int], int] = int
    now: Callable[[], float] = time.perf_counter

    def time(self, run: Callable[[], object]) -> Timing:
        """Time ``run``, which may start work on the device without waiting for it."""
        for _ in range(WARM_UP):
            run()
        once = max(self._sample(run, 1), 1e-9)
        loops = self.agree(min(MOST_LOOPS, ceil(self.seconds / once)))
        return of_samples([self._sample(run, loops) / loops for _ in range(self.samples)])

    def _sample(self, run: Callable[[], object], loops: int) -> float:
        self.synchronize()
        start = self.now()
        for _ in range(loops):
            run()
        self.synchronize()
        return self.now() - start


def of_samples(samples: Sequence[float]) -> Timing:
    """Median and spread of samples."""
    middle = median(samples)
    if len(samples) < 2 or not middle:
        return Timing(middle, 0.0)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / middle)
