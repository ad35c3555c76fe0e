"""The inference engine: a request queue, a worker thread that runs the model, and the other ranks.

The model answers several requests at once (:mod:`mindspeed.inference.continuous_batching`). Before
every step rank 0 broadcasts a batch update: which requests to remove (client disconnected, deadline
passed) and which one to add, the first of the queue if its sequences fit into the batch. At most
one request is added per step, so a long prompt delays the others only by its own prefill. Errors of
a single request are found before it is broadcast, or on every rank alike. Any other error ends all
running requests and, on several ranks, the server: the state of the other ranks is unknown.
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
from mindspeed.inference.continuous_batching import (
    CachedPrompt,
    ContinuousBatcher,
    PromptScores,
)
from mindspeed.inference.parallel_groups import Rank0Broadcast
from mindspeed.inference.prefix_cache import PrefixCache, why_not_shared
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import OutputChunk, TextGenerator

_POLL_SECONDS = 0.1  # of an idle worker, to notice close()


class QueueFull(Exception):
    """The request queue is full."""


class RequestTimeout(Exception):
    """The request did not complete before its deadline."""


class EngineFailed(Exception):
    """The model failed; the log has the traceback."""


@dataclass(frozen=True)
class GenerationJob:
    """The part of a request that all ranks need.

    Attributes:
        prompts: Token ids of each prompt.
        prompt_scores: Also score the tokens of the prompts.
    """

    prompts: list[list[int]]
    options: SamplingOptions
    prompt_scores: bool = False

    @property
    def num_sequences(self) -> int:
        """Number of continuations."""
        return len(self.prompts) * self.options.num_return_sequences


@dataclass(frozen=True)
class BatchUpdate:
    """Changes to the running batch before a step: requests to remove, at most one to add."""

    remove: tuple[int, ...] = ()
    add: tuple[int, GenerationJob] | None = None


@dataclass
class QueuedRequest:
    """A request and the consumer of its output.

    Attributes:
        job: What to generate.
        deadline: On ``time.monotonic``'s clock.
        deliver: Called by the worker with output chunks, then with an exception or None at the end.
        cancelled: Set when the client no longer reads.
    """

    job: GenerationJob
    deadline: float
    deliver: Callable[[Any], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def abandoned(self) -> bool:
        """Whether it was cancelled or its deadline has passed."""
        return self.cancelled.is_set() or time.monotonic() > self.deadline


class Engine:
    """The model behind a queue, on rank 0.

    Args:
        generator: The model.
        control: Broadcasts batch updates to the other ranks.
        max_queue: Requests that may wait; more are refused.
        timeout: Seconds that a request may take from arrival to end.
        max_batch_size: Sequences that are decoded at once; a larger request runs alone.
        prefix_bytes: Of keys and values that requests leave for those that begin alike.

    Attributes:
        on_failure: Called by the worker thread when it ends with an error, stored in ``error``.
    """

    def __init__(
        self,
        generator: TextGenerator,
        control: Rank0Broadcast,
        max_queue: int = 64,
        timeout: float = 600.0,
        max_batch_size: int = 16,
        prefix_bytes: int = 0,
    ) -> None:
        self.generator, self._control = generator, control
        self._batcher, self._max_batch_size = batcher_of(generator, prefix_bytes), max_batch_size
        self._running: dict[int, QueuedRequest] = {}
        self._next: QueuedRequest | None = None  # head of the queue, waits for room in the batch
        self._keys = itertools.count()
        self._queue: queue.Queue[QueuedRequest] = queue.Queue(max_queue)
        self._timeout = timeout
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.error: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None

    @property
    def queue_length(self) -> int:
        """Number of waiting requests."""
        return self._queue.qsize() + (self._next is not None)

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._closing.is_set()

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    def close(self) -> None:
        """End the running requests, stop the other ranks and the worker thread."""
        self._closing.set()
        self._thread.join()

    async def stream(
        self, job: GenerationJob
    ) -> AsyncIterator[OutputChunk | PromptScores | CachedPrompt]:
        """Generate; what is known of the prompts comes first. Closing it cancels the request.

        Raises:
            QueueFull: The queue is full.
            RequestTimeout: The deadline has passed.
            EngineFailed: The model failed.
            MindSpeedError: The request is invalid.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def deliver(event: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = QueuedRequest(job, time.monotonic() + self._timeout, deliver)
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            raise QueueFull from None
        if not self.healthy:  # checked after put: the worker empties the queue when it ends
            raise EngineFailed
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            request.cancelled.set()

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                update = self._schedule()
                if update is not None:
                    self._step(update)
        except BaseException as error:
            self.error = error
        finally:
            if self.error is None:
                self._control.broadcast(None)  # stops the other ranks
            self._closing.set()
            self._finish(list(self._running), None if self.error is None else EngineFailed())
            if self._next is not None:
                self._next.deliver(EngineFailed())
            while not self._queue.empty():
                self._queue.get_nowait().deliver(EngineFailed())
            if self.error is not None:
                self.on_failure()

    def _schedule(self) -> BatchUpdate | None:
        """The next batch update; None while there is nothing to run."""
        remove = tuple(key for key, request in self._running.items() if request.abandoned)
        for key in remove:
            self._finish([key], _timeout_of(self._running[key]))
        request = self._admit()
        if request is None:
            return BatchUpdate(remove) if remove or self._running else None
        key = next(self._keys)
        self._running[key] = request
        return BatchUpdate(remove, (key, request.job))

    def _admit(self) -> QueuedRequest | None:
        """The first request of the queue, if it fits into the batch."""
        while True:
            if self._next is None:
                try:
                    timeout = None if self._running else _POLL_SECONDS
                    self._next = self._queue.get(timeout is not None, timeout)
                except queue.Empty:
                    return None
            if self._next.abandoned:
                self._next.deliver(_timeout_of(self._next))
                self._next = None
                continue
            batch_size = sum(request.job.num_sequences for request in self._running.values())
            if batch_size and batch_size + self._next.job.num_sequences > self._max_batch_size:
                return None
            admitted, self._next = self._next, None
            return admitted

    def _step(self, update: BatchUpdate) -> None:
        """Run one step; raises only errors that the server cannot survive."""
        self._control.broadcast(update)
        try:
            for key, event in run_step(self._batcher, update):
                if isinstance(event, MindSpeedError):
                    self._finish([key], event)
                else:
                    self._running[key].deliver(event)
            self._finish([key for key in self._running if key not in self._batcher], None)
        except Exception as error:
            traceback.print_exc()
            for key in self._running:
                self._batcher.remove(key)
            self._finish(list(self._running), EngineFailed())
            if dist.get_world_size() > 1:
                raise error

    def _finish(self, keys: list[int], error: Exception | None) -> None:
        for key in keys:
            self._running.pop(key).deliver(error)


def _timeout_of(request: QueuedRequest) -> Exception | None:
    return None if time.monotonic() <= request.deadline else RequestTimeout()


def run_step(batcher: ContinuousBatcher, update: BatchUpdate) -> Iterator[tuple[Any, Any]]:
    """Apply a batch update and run one step. Collective.

    Yields:
        ``(request key, event)``: an output chunk, what is known of a prompt, or why the request is
        refused.
    """
    for key in update.remove:
        batcher.remove(key)
    if update.add is not None:
        key, job = update.add
        try:
            scores = batcher.add(key, job.prompts, job.options, job.prompt_scores)
            yield from ((key, score) for score in scores)
        except MindSpeedError as error:
            yield key, error
    yield from batcher.step()


def batcher_of(generator: TextGenerator, prefix_bytes: int) -> ContinuousBatcher:
    """A batcher, with a prefix cache if it may have bytes and the model allows one."""
    shared = prefix_bytes > 0 and why_not_shared(generator.stage) is None
    return ContinuousBatcher(generator, PrefixCache(prefix_bytes) if shared else None)


def follow(generator: TextGenerator, control: Rank0Broadcast, prefix_bytes: int = 0) -> None:
    """Main loop of the other ranks: take part in every step until rank 0 stops."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 receives them too and announces the end
    batcher = batcher_of(generator, prefix_bytes)
    while (update := control.broadcast()) is not None:
        for _ in run_step(batcher, update):
            pass
