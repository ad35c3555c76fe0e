"""Requests wait in a queue; one thread runs the model; the other ranks follow.

The model answers several requests at once (:mod:`mindspeed.inference.together`). Before every turn
rank 0 says on all ranks who leaves (the client left, a deadline passed) and who joins: the first
of the queue, when its rows fit beside the others'. At most one joins a turn, so a long prompt holds
up the others for no more than itself. What is wrong with a request itself is found before it is
announced, or on every rank alike. Any other error ends the requests under way, and on several ranks
the server too: nobody knows how far the others got.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import signal
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mindspeed.errors import MindSpeedError
from mindspeed.inference.control import Control
from mindspeed.inference.generator import Generator, Piece
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.together import PromptScores, Together


class Busy(Exception):
    """The queue is full."""


class TooSlow(Exception):
    """The request's time was over before its end."""


class Failed(Exception):
    """The model failed; the log says how."""


@dataclass(frozen=True)
class Job:
    """What all ranks need to know of a request.

    Attributes:
        prompts: Token ids.
        options: How they go on.
        prompt_scores: The prompts' own tokens are scored, too.
    """

    prompts: list[list[int]]
    options: SamplingOptions
    prompt_scores: bool = False

    @property
    def rows(self) -> int:
        """Continuations."""
        return len(self.prompts) * self.options.num_return_sequences


@dataclass(frozen=True)
class Turn:
    """What rank 0 says before a turn: requests that leave, and at most one that joins."""

    leave: tuple[int, ...] = ()
    join: tuple[int, Job] | None = None


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
        rows: Continuations that the model makes at once; a larger request runs alone.

    Attributes:
        on_failure: Called by the worker when it ends by an error, which is in ``error``.
    """

    def __init__(
        self,
        generator: Generator,
        control: Control,
        waiting: int = 64,
        timeout: float = 600.0,
        rows: int = 16,
    ) -> None:
        self.generator, self._control = generator, control
        self._together, self._rows = Together(generator), rows
        self._running: dict[int, Ticket] = {}
        self._next: Ticket | None = None  # taken out of the queue, waits for room
        self._numbers = itertools.count()
        self._queue: queue.Queue[Ticket] = queue.Queue(waiting)
        self._timeout = timeout
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.qsize() + (self._next is not None)

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing.is_set()

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """End the present requests, tell the other ranks, and stop."""
        self._closing.set()
        self._thread.join()

    async def pieces(self, job: Job) -> AsyncIterator[Piece | PromptScores]:
        """Generate; scores of the prompts come first. Leaving early ends the request.

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
                turn = self._decide()
                if turn is not None:
                    self._take(turn)
        except BaseException as error:
            self.error = error
        finally:
            if self.error is None:
                self._control.agree(None)  # the other ranks end
            self._closing.set()
            self._end(list(self._running), None if self.error is None else Failed())
            if self._next is not None:
                self._next.deliver(Failed())
            while not self._queue.empty():
                self._queue.get_nowait().deliver(Failed())
            if self.error is not None:
                self.on_failure()

    def _decide(self) -> Turn | None:
        """Who leaves and who joins; None while there is nothing to do."""
        leave = tuple(number for number, t in self._running.items() if t.unwanted)
        for number in leave:
            self._end([number], _last_word(self._running[number]))
        joining = self._joining()
        if joining is None:
            return Turn(leave) if leave or self._running else None
        number = next(self._numbers)
        self._running[number] = joining
        return Turn(leave, (number, joining.job))

    def _joining(self) -> Ticket | None:
        """The first of the queue, if there is room for it."""
        while True:
            if self._next is None:
                try:
                    patience = None if self._running else 0.1
                    self._next = self._queue.get(patience is not None, patience)
                except queue.Empty:
                    return None
            if self._next.unwanted:
                self._next.deliver(_last_word(self._next))
                self._next = None
                continue
            running = sum(ticket.job.rows for ticket in self._running.values())
            if running and running + self._next.job.rows > self._rows:
                return None
            found, self._next = self._next, None
            return found

    def _take(self, turn: Turn) -> None:
        """Run one turn; raises only what the server cannot survive."""
        self._control.agree(turn)
        try:
            for number, event in run(self._together, turn):
                if isinstance(event, MindSpeedError):
                    self._end([number], event)
                else:
                    self._running[number].deliver(event)
            self._end([n for n in self._running if n not in self._together], None)
        except Exception as error:
            traceback.print_exc()
            for number in self._running:
                self._together.leave(number)
            self._end(list(self._running), Failed())
            if dist.get_world_size() > 1:
                raise error

    def _end(self, numbers: list[int], word: Exception | None) -> None:
        for number in numbers:
            self._running.pop(number).deliver(word)


def _last_word(ticket: Ticket) -> Exception | None:
    return None if time.monotonic() <= ticket.deadline else TooSlow()


def run(together: Together, turn: Turn) -> Iterator[tuple[Any, Any]]:
    """What a turn brings to which request: pieces, prompt scores, or why it cannot be answered.

    Collective.
    """
    for number in turn.leave:
        together.leave(number)
    if turn.join is not None:
        number, job = turn.join
        try:
            scores = together.join(number, job.prompts, job.options, job.prompt_scores)
            yield from ((number, score) for score in scores)
        except MindSpeedError as error:
            yield number, error
    yield from together.turn()


def follow(generator: Generator, control: Control) -> None:
    """Take part in every turn until rank 0 ends; the other ranks' whole life."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 hears them, too, and says when it is over
    together = Together(generator)
    while (turn := control.agree()) is not None:
        for _ in run(together, turn):
            pass
