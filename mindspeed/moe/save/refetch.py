"""The rows of the experts again: the dispatch of the layer's input, repeated in backward.

    refetch = Refetch(stages.repeat(chunk), rows)      # in forward
    out = refetch.tie(experts(rows), hidden)
    refetch.start()                                     # in backward: in flight
    refetch.rows()                                      # waits, [m, h]

A dispatcher says how, in ``repeat(chunk)``: functions of this rank and collectives, one after the
other, from ``hidden [n, h]`` to ``rows [m, h]`` in the order of the experts. It uses the counts and
maps of the forward, so nothing but the rows is communicated, and returns the same values bit for
bit. Up to the first collective everything happens in ``start``.

``hidden`` is saved through autograd, with the experts' result: the router keeps it anyway, and what
drops, restores or copies the saved tensors of the layer does it to this one, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed.moe.events import EventKind, EventLog
from mindspeed.moe.split_phase import Collective, InFlight
from mindspeed.spmd import Passes, typed

Local = Callable[[torch.Tensor], torch.Tensor]
Steps = Sequence["Local | Collective"]
NAME = "refetch"


class Refetch:
    """The rows of one chunk.

    Args:
        steps: Of the dispatcher, see above.
        like: The rows of the forward, ``[m, h]``: those that come back lie in memory as they did.
    """

    def __init__(
        self,
        steps: Steps,
        like: torch.Tensor,
        log: EventLog | None = None,
        chunk: int = 0,
    ) -> None:
        self._tie: weakref.ref[Any] | None = None
        self._launched = False  # in this backward
        self._steps, self._log, self._chunk = steps, log, chunk
        self._size, self._stride, self._offset = like.size(), like.stride(), like.storage_offset()
        self._in_flight: tuple[torch.Tensor, Any, InFlight | None, Sequence[Any]] | None = None

    def tie(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Save ``hidden [n, h]`` with the experts' result ``out [m, h]``, which is returned."""
        return _Tie.apply(out, hidden.detach(), self)  # type: ignore[no-any-return]

    @torch.no_grad()
    def start(self) -> None:
        """Launch the first collective; all ranks do it at the same place of their backward."""
        tie = self._tie() if self._tie is not None else None
        assert tie is not None, "the rows are asked for outside of a backward"
        (hidden,) = tie.saved_tensors
        self._launched = True
        self._in_flight = self._run(hidden, self._steps)

    @torch.no_grad()
    def rows(self) -> torch.Tensor:
        """Wait, and return the rows ``[m, h]``; starts first if nothing is on its way."""
        if self._in_flight is None:
            self.start()
        assert self._in_flight is not None
        x, sent, work, rest = self._in_flight
        self._in_flight = None
        while True:
            if work is not None:
                self._note(EventKind.FINISH)
                work.wait()
            del sent
            if not rest:
                break
            x, sent, work, rest = self._run(x, rest)
        if (x.stride(), x.storage_offset()) == (self._stride, self._offset):
            return x
        span = sum((n - 1) * s for n, s in zip(self._size, self._stride, strict=True)) + 1
        out = x.new_empty(self._offset + span if x.numel() else 0)
        return out.as_strided(self._size, self._stride, self._offset).copy_(x)

    def drain(self) -> None:
        """Wait for rows that nobody has asked for."""
        if self._in_flight is not None:
            self.rows()

    def _run(
        self, x: torch.Tensor, steps: Sequence[Any]
    ) -> tuple[torch.Tensor, Any, InFlight | None, Sequence[Any]]:
        """Compute up to the next collective, which is launched."""
        for i, step in enumerate(steps):
            if not hasattr(step, "launch"):
                x = step(x)
                continue
            y, work = step.launch(x)
            self._note(EventKind.START, x.nbytes)
            return y, x, work, steps[i + 1 :]
        return x, None, None, ()

    def _note(self, kind: EventKind, nbytes: int = 0) -> None:
        if self._log is not None:
            self._log.add("backward", kind, f"{NAME}.rows", self._chunk, nbytes)


@typed(Passes())
class _Tie(torch.autograd.Function):
    """Returns the experts' result; keeps the layer's input until its backward has run."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, hidden: torch.Tensor, refetch: Refetch
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.refetch, refetch._tie = refetch, weakref.ref(ctx)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.refetch._launched:  # no communication has started it
            ctx.refetch.start()
        ctx.refetch._launched = False
        return *grads, None, None
