"""How many rows of a rank an expert has room for.

    Capacity    ceil(k n / E * factor), at least 4 and at most n
    Window      of the loads of earlier steps: the mean of the last five, and twenty more

n: tokens of the rank. Source: DeepSpeed's ``_capacity``, with the limit n, as in its top-1 gate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

MINIMUM = 4


@dataclass(frozen=True)
class Capacity:
    """A multiple of the mean load.

    Attributes:
        factor: > 0.
        experts: of the layer.
        topk: experts of a token.
    """

    factor: float
    experts: int
    topk: int

    def __call__(self, tokens: int) -> int:
        """Rows for an expert, of the tokens of one rank."""
        # The factor is the decimal that was written: 1.1 * 10 is 11, not 11.000000000000002.
        exact = Fraction(repr(float(self.factor))) * self.topk * tokens / self.experts
        return min(max(math.ceil(exact), MINIMUM), tokens)


@dataclass(eq=False)
class Window:
    """A capacity that follows the loads of earlier steps, one for all steps of a window.

    So shapes change once in a window only, and never within a step: a recomputation finds the
    capacity of its forward, and what it observes again changes nothing. All ranks that observe the
    same loads have the same capacity. It is not saved: training that resumes begins a first window.

    Attributes:
        capacity: of this window; before one is complete, the first's.
        length: steps of a window.
        last: steps at its end whose mean predicts the next window.
        margin: rows on top of the mean.
    """

    capacity: int = 256
    length: int = 20
    last: int = 5
    margin: int = 20
    _largest: int = -1
    _loads: list[int] = field(default_factory=list)

    def __call__(self, tokens: int) -> int:
        """Rows for an expert, of the tokens of one rank; their number does not matter."""
        return self.capacity

    def observe(self, load: int) -> None:
        """Take the largest number of rows that any rank had for any expert in a micro-batch."""
        self._largest = max(self._largest, load)

    def advance(self) -> None:
        """The step is over; nothing happens if no load was observed in it."""
        if self._largest < 0:
            return
        self._loads.append(self._largest)
        self._largest = -1
        if len(self._loads) == self.length:
            mean = Fraction(sum(self._loads[-self.last :]), self.last)
            self.capacity = math.ceil(mean) + self.margin
            self._loads.clear()
