"""A number far above its recent range: robust, by median and MAD of the last steps.

The standard deviation is estimated as 1.4826 times the median of the distances from the median
(MAD), which one spike does not move. A number is a spike if it lies more than :data:`DEVIATIONS`
of these above the median and is also :data:`FACTORS` times as large; the latter for series that
hardly vary. Only numbers above the range count.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from dataclasses import dataclass

WINDOW = 64
"""Steps that a number is compared with."""
LEAST = 16
"""Steps that are needed to judge."""
DEVIATIONS = 8.0
FACTORS = {"loss": 1.2, "largest loss of a micro-batch": 1.5, "gradient norm": 3.0}


@dataclass(frozen=True)
class Spike:
    """A number outside of its range.

    Attributes:
        what: One of :data:`FACTORS`.
        value: The number.
        median: Of the window.
        deviation: 1.4826 times its MAD.
        steps: Of the window.
    """

    what: str
    value: float
    median: float
    deviation: float
    steps: int

    def __str__(self) -> str:
        return (
            f"the {self.what} is {self.value:.4g}, in the {self.steps} steps before "
            f"{self.median:.4g} with a deviation of {self.deviation:.2g}"
        )


class Spikes:
    """Series of numbers, one a step."""

    def __init__(self) -> None:
        self._series: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def add(self, what: str, value: float) -> Spike | None:
        """Add the number of a step; what it is if it is a spike. Others than finite ones are left.

        Args:
            what: One of :data:`FACTORS`.
            value: The number.
        """
        if not math.isfinite(value):
            return None
        series = self._series[what]
        found = None
        if len(series) >= LEAST:
            median = statistics.median(series)
            deviation = 1.4826 * statistics.median(abs(one - median) for one in series)
            if value > max(median + DEVIATIONS * deviation, FACTORS[what] * median):
                found = Spike(what, value, median, deviation, len(series))
        series.append(value)
        return found
