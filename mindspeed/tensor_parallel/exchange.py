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
    again           all-gather of the column layer's input for its    by the column layer
                    weight gradient (SP)
    grad_input      all-reduce (SP: reduce-scatter) of the column     by the program, before it
                    layer's dx                                        reads that gradient
    ==============  ================================================  ============================

:mod:`mindspeed.te.linear_communication` asks :func:`current` in forward and keeps the answer for
backward. The row layer's weight gradient is left to the program, too (:meth:`PartExchange.put`): it
is computed after the column layer's reduction has started.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Started = tuple[torch.Tensor, Any]
"""Result of a gather, complete after the handle's ``wait()``."""
Computation = Callable[[], Sequence[torch.Tensor | None]]
"""Gradients of some weights."""


@dataclass(eq=False)
class PartExchange:
    """The collectives of one call of a part; see the module.

    Attributes:
        gathers_again: The column layer needs ``again``.
        between: Called with the input of the row layer, returns what the layer multiplies: whatever
            must run there runs in it. None: nothing must.
    """

    input: Started | None = None
    output: Any = None
    grad_output: Started | None = None
    again: Started | None = None
    gathers_again: bool = False
    grad_input: Any = None
    between: Callable[[torch.Tensor], torch.Tensor] | None = None
    _waiting: list[tuple[Sequence[torch.Tensor], Computation]] = field(default_factory=list)

    def finish(self, name: str) -> None:
        """Wait for ``output`` or ``grad_input``, if it is under way."""
        work = getattr(self, name)
        setattr(self, name, None)
        if work is not None:
            work.wait()

    def take(self, name: str) -> Started | None:
        """Return ``input``, ``grad_output`` or ``again`` once; the caller waits for it."""
        found: Started | None = getattr(self, name)
        setattr(self, name, None)
        return found

    def put(self, weights: Sequence[torch.Tensor], compute: Computation) -> None:
        """Take the computation of the gradients of some weights."""
        self._waiting.append((weights, compute))

    def weight_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Compute the gradients that were left: each weight and its gradient or placeholder."""
        waiting, self._waiting = self._waiting, []
        for weights, compute in waiting:
            for weight, grad in zip(weights, compute(), strict=True):
                if grad is not None:
                    yield weight, grad


class _Threads(threading.local):
    current: PartExchange | None = None


_threads = _Threads()


def current() -> PartExchange | None:
    """The exchange of the part that this thread runs; None outside of any."""
    return _threads.current


@contextlib.contextmanager
def running(exchange: PartExchange | None) -> Iterator[None]:
    """Leave collectives of linear layers called in the block to ``exchange``; None: to nobody."""
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
