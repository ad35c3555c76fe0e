"""The bound of rows that a rank sends to another, where their number stays on the device.

    C = ceil(c N k / R)                N tokens of a rank, k experts of each, R ranks

Buffers have R C rows. Rows beyond C are not sent; that there were any is a flag on the device, for
each layer, which nobody reads before the end of a step. Then all ranks agree by one element and
either stop, or compute the step again with the next bound: twice as much each time, up to all
rows that a token can send to a rank, N min(k, experts of a rank), which is never too little.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch


@dataclass(eq=False)
class DeviceBound:
    """The bound of all layers.

    Attributes:
        factor: c, how many times the mean load of a rank, at least 1.
        most: the factor of the last routing in all layers at which nothing can be too much.
        flags: by number of the layer bool ``[]`` on the device: it had too many rows.
    """

    factor: float
    most: float = 1.0
    flags: dict[int, torch.Tensor] = field(default_factory=dict)

    def rows(self, tokens: int, topk: int, ranks: int, local: int) -> int:
        """C for ``tokens`` of this rank.

        Args:
            topk: k, the most experts of a token.
            ranks: R.
            local: experts of a rank.
        """
        worst = tokens * min(topk, local)
        mean = tokens * topk / ranks
        self.most = max(self.most, min(topk, local) * ranks / topk)
        return max(min(ceil(self.factor * mean), worst), 1)

    def note(self, layer: int, overflow: torch.Tensor) -> None:
        """Remember whether a layer had too many rows, bool ``[]``."""
        before = self.flags.get(layer)
        self.flags[layer] = overflow if before is None else before | overflow

    def overflown(self) -> torch.Tensor | None:
        """Whether any layer of this rank had too many rows, bool ``[]``; None: nothing ran."""
        return torch.stack(list(self.flags.values())).any() if self.flags else None

    def layers(self) -> list[int]:
        """The layers of this rank with too many rows; waits for the device."""
        return [layer for layer, flag in self.flags.items() if bool(flag)]

    def grow(self) -> bool:
        """Take the next bound; False if there is none."""
        if self.factor >= self.most:
            return False
        self.factor = min(2 * self.factor, self.most)
        return True
