"""Sets of modules of a layer that are worth a candidate that computes them again.

    subsets({"layernorm": Saving(112, 0.13), "mlp": Saving(328, 2.6)}, Saving(832, 5.2))

Recomputing the first n layers of a chunk trades memory for time along a line: the bytes that a
layer saves by the second that it takes. Modules above this line are added one by one, those that
save most by the second first; each step is a candidate. Modules below the line are no candidates:
whole layers save as much in less time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mindspeed.memory.selective import together


class Saving(NamedTuple):
    """What computing a part of a layer again does to the layer.

    Attributes:
        nbytes: bytes that are not kept from forward to backward.
        seconds: by which its backward becomes longer.
    """

    nbytes: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes by the second."""
        if self.nbytes <= 0:
            return 0.0
        return self.nbytes / self.seconds if self.seconds > 0 else float("inf")


def subsets(modules: Mapping[str, Saving], layer: Saving) -> list[tuple[str, ...]]:
    """Sets of modules that are worth a candidate, the cheapest first.

    Args:
        modules: what each of them saves alone.
        layer: what a whole layer saves.
    """
    worth = [name for name, one in modules.items() if one.rate > layer.rate]
    found: list[tuple[str, ...]] = []
    for name in sorted(worth, key=lambda name: (-modules[name].rate, name)):
        more = together(found[-1] if found else (), name)
        if not found or more != found[-1]:
            found.append(more)
    return found
