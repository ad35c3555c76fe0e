"""Collectives that two linear layers start and that a program waits for.

A part of a layer is a column-parallel linear layer, something in between, and a row-parallel one.
While it runs inside :func:`running`, its linear layers do not wait:

    ==============  ================================================  ============================
    attribute       collective                                        waited for
    ==============  ================================================  ============================
    input           all-gather of the column layer's input (SP)       by the column layer
    output          all-reduce (SP: reduce-scatter) of the row        by the program, before it
                    layer's output                                    reads that output
    grad_output     all-gather of the row layer's dy (SP)             by the row layer
    grad_input      all-reduce (SP: reduce-scatter) of the column     by the program, before it
                    layer's dx                                        reads that gradient
    ==============  ================================================  ============================

:mod:`mindspeed.te.linear_communication` asks :func:`current` in forward and keeps the answer for
backward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Started = tuple[torch.Tensor, Any]
"""Result of a gather, complete after the handle's ``wait()``."""


@dataclass(eq=False)
class Exchange:
    """The collectives of one call of a part; see the module.

    Attributes:
        between: Called with the input of the row layer, returns what the layer multiplies: whatever
            must run there runs in it. None: nothing must.
    """

    input: Started | None = None
    output: Any = None
    grad_output: Started | None = None
    grad_input: Any = None
    between: Callable[[torch.Tensor], torch.Tensor] | None = None

    def finish(self, name: str) -> None:
        """Wait for ``output`` or ``grad_input``, if it is under way."""
        work = getattr(self, name)
        setattr(self, name, None)
        if work is not None:
            work.wait()

    def take(self, name: str) -> Started | None:
        """Return ``input`` or ``grad_output`` once; the caller waits for it."""
        found: Started | None = getattr(self, name)
        setattr(self, name, None)
        return found


class _Threads(threading.local):
    current: Exchange | None = None


_threads = _Threads()


def current() -> Exchange | None:
    """The exchange of the part that this thread runs; None outside of any."""
    return _threads.current


@contextlib.contextmanager
def running(exchange: Exchange | None) -> Iterator[None]:
    """Linear layers called in the block leave their collectives to ``exchange``; None: to nobody."""
    before, _threads.current = _threads.current, exchange
    try:
        yield
    finally:
        _threads.current = before


def at_row_input(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Run what must run between the two layers; a forward pre-hook of the row layer."""
    exchange = current()
    if exchange is None or exchange.between is None:
        return None
    between, exchange.between = exchange.between, None
    return (between(args[0]), *args[1:])
