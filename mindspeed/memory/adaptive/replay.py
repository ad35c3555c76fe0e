"""A data iterator that can start again, so that a step can be repeated."""

from __future__ import annotations

from typing import Any


class Replay:
    """Remembers the micro-batches of one step.

    Args:
        source: the data iterator, whose attributes it has; None on stages that read nothing.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._next = source, 0
        self._read: list[Any] = []

    def from_the_start(self) -> Replay | None:
        """The iterator at the first micro-batch; None if there is no source."""
        self._next = 0
        return None if self._source is None else self

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._next == len(self._read):
            self._read.append(next(self._source))
        self._next += 1
        return self._read[self._next - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
