"""A pair of tensors that were compared."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.compare.names import Name
from mindspeed.compare.recording import Recorded
from mindspeed.compare.rounding import Difference


@dataclass(frozen=True)
class Row:
    """A compared tensor.

    Attributes:
        a: Of the run that is trusted.
        b: Of the other one.
        difference: Of the two.
    """

    a: Recorded
    b: Recorded
    difference: Difference

    @property
    def name(self) -> Name:
        """The name in A."""
        return self.a.name
