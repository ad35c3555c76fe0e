"""Base of the counters of this library: a ``with`` block watched by a ``TorchDispatchMode``.

An instrument sees every operator of its block and knows the phase (forward, backward, recompute)
it belongs to. Its figures may be read inside and after the block, and instruments may nest.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.instruments.phase import PhaseTracker

Self = TypeVar("Self", bound="Instrument")


class Instrument:
    """Context manager of a phase tracker and a dispatch mode, which a subclass sets.

    Attributes:
        mode: Sees the operators of the block.
        phase: Says which phase they belong to.
    """

    mode: TorchDispatchMode

    def __init__(self) -> None:
        self.phase = PhaseTracker()
        self._stack = ExitStack()

    def enter_contexts(self, stack: ExitStack) -> None:
        """Enter what else the instrument needs; it is left before the phase tracker."""
        stack.enter_context(self.mode)

    def __enter__(self: Self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.phase)
            self.enter_contexts(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
