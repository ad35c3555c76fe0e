"""SIGTERM ends a plan as Ctrl-C does: what was found until then is printed.

with interruptible() as stop:
    found = search(...)            # KeyboardInterrupt at either signal
return stop.status if found.interrupted else 0
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

CTRL_C, TERMINATED = 130, 143
"""Exit statuses."""


@dataclass
class Stop:
    """How a plan was ended.

    Attributes:
        status: exit status of the command if it was.
    """

    status: int = CTRL_C


@contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGTERM raises KeyboardInterrupt, once; further ones wait for the result to be printed.

    Raises:
        SystemExit: SIGTERM came before there was a result.
    """
    stop = Stop()

    def interrupt(number: int, frame: FrameType | None) -> None:
        first, stop.status = stop.status != TERMINATED, TERMINATED
        if first:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield stop
        return
    try:
        yield stop
    except KeyboardInterrupt:
        if stop.status == TERMINATED:
            print("interrupted: nothing was found until then", file=sys.stderr)
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
