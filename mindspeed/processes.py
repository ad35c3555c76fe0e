"""Child processes, their cores and ports."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import socket
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_FIRST_EPHEMERAL = 32_768  # port of Linux


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let Linux end this process when its parent dies.

    Args:
        number: signal that it gets then.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Import without garbage collections, which would walk all objects of torch and free none."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def imports_of_command() -> Iterator[None]:
    """The same for imports that stay until the process ends: later collections skip them, too."""
    with no_collection():
        yield
        gc.freeze()


def free_port() -> int:
    """A free TCP port to listen on later.

    Outside the ephemeral range, from which another process could get it in the meantime.
    """
    draw = random.SystemRandom()  # other generators have equal seeds in ranks and test workers
    while True:
        port = draw.randrange(10_000, _FIRST_EPHEMERAL)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
