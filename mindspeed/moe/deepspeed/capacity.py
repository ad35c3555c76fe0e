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


@dataclass
class Window:
    """A capacity that follows the loads it has seen, one for the steps of a window.

    So shapes change once in a window only. It is the same on all ranks that observe the same loads.

    Attributes:
        capacity: of this window; the first one's until a window is complete.
        length: steps of a window.
        last: steps at its end whose mean predicts the next window.
        margin: rows on top of the mean.
    """

    capacity: int = 256
    length: int = 20
    last: int = 5
    margin: int = 20
    _loads: list[int] = field(default_factory=list)

    def observe(self, load: int) -> None:
        """Take the largest number of rows that any rank had for any expert in a step."""
        self._loads.append(load)
        if len(self._loads) == self.length:
            self.capacity = math.ceil(Fraction(sum(self._loads[-self.last :]), self.last))
            self.capacity += self.margin
            self._loads.clear()
