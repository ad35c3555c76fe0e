"""Requests wait in a queue; one thread runs the model; the other ranks follow.

A request is announced to all ranks, then every rank generates. After every piece rank 0 says
whether it goes on: a client that left or a deadline that passed ends the request on all ranks at
the same token. What is wrong with a request itself is found before it is announced, or on every
rank alike. Any other error ends the request, and on several ranks the server too: nobody knows how
far the others got.
"""

from __future__ import annotations

import asyncio
import queue
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mindspeed.errors import MindSpeedError
from mindspeed.inference.control import Control
from mindspeed.inference.generator import Generator, Piece
from mindspeed.inference.sampling import SamplingOptions


class Busy(Exception):
    """The queue is full."""


class TooSlow(Exception):
    """The request's time was over before its end."""


class Failed(Exception):
    """The model failed; the log says how."""


@dataclass(frozen=True)
class Job:
    """What all ranks need to know of a request."""

    prompts: list[list[int]]
    options: SamplingOptions


@dataclass
class Ticket:
    """A request on its way, and where its pieces go.

    Attributes:
        job: What is generated.
        deadline: On ``time.monotonic``'s clock.
        deliver: Takes pieces, an exception, or None at the end; called by the worker.
        cancelled: Set when nobody wants the rest.
    """

    job: Job
    deadline: float
    deliver: Callable[[Any], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def unwanted(self) -> bool:
        """Whether generating more is no use."""
        return self.cancelled.is_set() or time.monotonic() > self.deadline


class Engine:
    """The model behind a queue, on rank 0.

    Args:
        generator: The model.
        control: The ranks.
        waiting: Requests that may wait; more are refused.
        timeout: Seconds that a request may take from arrival to end.

    Attributes:
        on_failure: Called by the worker when it ends by an error, which is in ``error``.
    """

    def __init__(
        self, generator: Generator, control: Control, waiting: int = 64, timeout: float = 600.0
    ) -> None:
        self.generator, self._control = generator, control
        self._queue: queue.Queue[Ticket] = queue.Queue(waiting)
        self._timeout = timeout
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.qsize()

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing.is_set()

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """End the present request, tell the other ranks, and stop."""
        self._closing.set()
        self._thread.join()

    async def pieces(self, job: Job) -> AsyncIterator[Piece]:
        """Generate. Leaving early ends the request.

        Raises:
            Busy: The queue is full.
            TooSlow: The time is over.
            Failed: The model failed.
            MindSpeedError: The request cannot be answered.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def deliver(event: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, event)

        ticket = Ticket(job, time.monotonic() + self._timeout, deliver)
        try:
            self._queue.put_nowait(ticket)
        except queue.Full:
            raise Busy from None
        if not self.healthy:  # asked afterwards: the worker empties the queue when it ends
            raise Failed
        try:
            while (event := await arrived.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            ticket.cancelled.set()

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    ticket = self._queue.get(timeout=0.1)
                except queue.Empty:
                    continue
                self._answer(ticket)
        except BaseException as error:
            self.error = error
        finally:
            if self.error is None:
                self._control.agree(None)  # the other ranks end
            self._closing.set()
            while not self._queue.empty():
                self._queue.get_nowait().deliver(Failed())
            if self.error is not None:
                self.on_failure()

    def _answer(self, ticket: Ticket) -> None:
        """Run one request to an end of some kind; raises only what the server cannot survive."""
        try:
            if not ticket.unwanted:
                self._control.agree(ticket.job)
                for piece in run(self.generator, self._control, ticket.job, self._stops(ticket)):
                    ticket.deliver(piece)
            ticket.deliver(None if time.monotonic() <= ticket.deadline else TooSlow())
        except MindSpeedError as error:
            ticket.deliver(error)
        except Exception as error:
            traceback.print_exc()
            ticket.deliver(Failed())
            if dist.get_world_size() > 1:
                raise error

    def _stops(self, ticket: Ticket) -> Callable[[], bool]:
        return lambda: ticket.unwanted or self._closing.is_set()


def run(
    generator: Generator, control: Control, job: Job, stops: Callable[[], bool] = lambda: False
) -> Any:
    """Pieces of a job, as long as rank 0's ``stops`` says no. Collective."""
    with closing(generator.pieces(job.prompts, job.options)) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            yield piece
            if control.agree(stops()):
                return


def follow(generator: Generator, control: Control) -> None:
    """Take part in every request until rank 0 ends; the other ranks' whole life."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 hears them, too, and says when it is over
    while (job := control.agree()) is not None:
        try:
            for _ in run(generator, control, job):
                pass
        except MindSpeedError:  # rank 0 has the same and tells the client
            continue
