"""Early stops: SIGTERM and time limits. All ranks stop after the same iteration.

Each rank may have its own reason, so they vote: one all-reduce of three numbers (reason, time, how
long a step takes). The slowest step also determines the iteration of the next vote, about once a
second, so that short steps have no overhead and all ranks agree on it.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device

SECONDS_BETWEEN_VOTES = 1.0
MAX_STEPS_BETWEEN_VOTES = 1000


class Stopping:
    """Checked after every iteration; use as a context manager, which installs the signal handler.

    Args:
        on_signal: stop on SIGTERM.
        minutes: stop after this time.
    """

    def __init__(self, *, on_signal: bool, minutes: float | None) -> None:
        self._on_signal = on_signal and threading.current_thread() is threading.main_thread()
        self._active = on_signal or minutes is not None
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signalled = False
        self._before: Any = None
        self._steps_to_vote = 1
        self._last_vote: float | None = None
        self._steps_since_vote = 0

    def __enter__(self) -> Stopping:
        if self._on_signal:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_signal:
            signal.signal(signal.SIGTERM, self._before)

    def reason(self) -> str | None:
        """Why to stop after this iteration, the same on all ranks, or None. Collective."""
        if not self._active:
            return None
        self._steps_since_vote += 1
        if self._steps_since_vote < self._steps_to_vote:
            return None
        return self._vote()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _vote(self) -> str | None:
        now = time.monotonic()
        late = self._deadline is not None and now >= self._deadline
        step = 0.0
        if self._last_vote is not None:
            step = (now - self._last_vote) / self._steps_since_vote
        where = device.current().torch_device()
        votes = torch.tensor([self._signalled, late, step], dtype=torch.float32, device=where)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        signalled, late_somewhere, slowest = votes.tolist()
        self._last_vote, self._steps_since_vote = now, 0
        steps = SECONDS_BETWEEN_VOTES / slowest if slowest else 1
        self._steps_to_vote = int(min(max(1, steps), MAX_STEPS_BETWEEN_VOTES))
        if signalled:
            return "SIGTERM received"
        return "time is up (--exit-duration-in-mins)" if late_somewhere else None
