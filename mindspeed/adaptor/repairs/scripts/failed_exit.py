"""Defect: a rank that failed does not end while a collective that it started is in flight.

Where: an interpreter that ends destroys its process groups, and gloo's wait there for collectives
that other ranks may never join, because they wait for something else of this rank.
Symptom: all wait for the time-out of their group, though the error was shown at once: torchrun, or
the framework that started the processes, sees no failure before.
Fix: a process that ends by an exception leaves a few seconds after all that is registered with
:mod:`atexit` has run. An exception of the main thread is known from ``sys.last_value``, one of a
process of :mod:`multiprocessing` (``torch.multiprocessing.spawn``) while it is passed on. A script
that catches it and calls ``sys.exit`` must destroy its groups itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import sys
from multiprocessing import util
from typing import Any

import torch.distributed as dist

from mindspeed.journal import Journal

_SECONDS = 5.0
OWNER = "failed exit"


def install(journal: Journal) -> None:
    """Watch how this process ends.

    Args:
        journal: Restores.
    """
    failed = []
    leave = vars(util)["_exit_function"]  # typeshed does not know it

    @functools.wraps(leave)
    def exit_function(*args: Any) -> None:
        if sys.exc_info()[1] is not None:
            failed.append(True)
        leave(*args)

    def end() -> None:
        if failed or getattr(sys, "last_value", None) is not None:
            end_soon()

    journal.set(util, "_exit_function", exit_function, owner=OWNER)
    atexit.register(end)
    journal.call_on_undo(functools.partial(atexit.unregister, end))


def end_soon() -> None:
    """End in a few seconds with status 1, by a thread that does not need the interpreter."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        nowhere = open(os.devnull, "w")  # noqa: SIM115  # it must outlive this function
        faulthandler.dump_traceback_later(_SECONDS, exit=True, file=nowhere)
