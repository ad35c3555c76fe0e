"""Bytes that memory-bound operators move where chains of them run as one kernel.

Fused kernels and compilers keep what one operator hands to the next in registers. A chain is what
runs between two matrix products, attentions or communications. A tensor that is made and read
inside one is not moved at all, and the chain is launched once: a lower bound, since a residual that
the chain makes and a later layer reads has to be written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mindspeed.instruments.clock import Call, extent, storage_of


class Chain:
    """The chain that runs now."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}  # storage -> bytes written that nothing has read
        self._credit = 0
        self._started = False

    def end(self) -> None:
        """A product, an attention or a communication runs."""
        self._made.clear()
        self._credit, self._started = 0, False

    def moved(self, call: Call) -> tuple[int, bool]:
        """Bytes that an operator of the chain moves, and whether it is the first one."""
        nbytes = call.nbytes - self._credit
        for tensor in _tensors((call.args, call.kwargs)):
            key = storage_of(tensor)
            if key in self._made:  # it is neither read, nor was it written
                nbytes -= extent(tensor) + self._made[key]
                self._made[key] = 0
        for tensor in _tensors(call.result):
            self._made[storage_of(tensor)] = extent(tensor)
        self._credit = max(0, -nbytes)
        first, self._started = not self._started, True
        return max(0, nbytes), first


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
