"""What drops and recomputes the activations of a model chunk, as a schedule asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Recomputation(Protocol):
    """The layers of one chunk; :mod:`mindspeed.memory.scheduled` has them.

    A micro-batch is any key.
    """

    def stored(self) -> AbstractContextManager[object]:
        """Around ``F``: the activations are stored."""
        ...

    def dropped(self, microbatch: Any) -> AbstractContextManager[object]:
        """Around ``Fc``: only inputs are."""
        ...

    def recompute(self, microbatch: Any) -> None:
        """``R``: everything that backward needs is there when it returns."""
        ...
