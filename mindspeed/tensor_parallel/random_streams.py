"""Random streams of a tracker, replayed: a recomputation draws the numbers of its forward.

    checkpoint(function, x, use_reentrant=False, context_fn=partial(replayed, tracker))

``torch.utils.checkpoint`` restores torch's generators only; Megatron draws dropout from streams of
a tracker, which it swaps in.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Tracker(Protocol):
    """Random states by name: Megatron's tracker, and that of :mod:`mindspeed.te`."""

    def get_states(self) -> dict[str, Any]:
        """The states as they are now."""
        ...

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace all states."""
        ...


def replayed(
    tracker: Tracker,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward that begins now, and of every recomputation of it."""
    return contextlib.nullcontext(), _Replay(tracker)


class _Replay:
    """Streams as they were when it was made; afterwards they go on where they were before."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._first = tracker, copied_states(tracker.get_states())

    def __enter__(self) -> None:
        self._now = copied_states(self._tracker.get_states())
        self._tracker.set_states(copied_states(self._first))

    def __exit__(self, *error: object) -> None:
        self._tracker.set_states(self._now)


def copied_states(states: dict[str, Any]) -> dict[str, Any]:
    """States of a tracker as they are now: it replaces tensors, and generators go on in place."""
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state
        for name, state in states.items()
    }
