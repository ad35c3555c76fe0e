"""The process: rank 0 serves until it is told to end, the others follow."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from mindspeed.data.templates import ChatTemplate
from mindspeed.inference.control import Control
from mindspeed.inference.generator import Generator
from mindspeed.inference.server.app import Service, create_app
from mindspeed.inference.server.connections import ConnectionLimits, uvicorn_config
from mindspeed.inference.server.engine import Engine, follow
from mindspeed.inference.server.guard import Limits


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True)
class ServeOptions:
    """What is served, and to whom.

    Attributes:
        name: Of the model, for clients.
        address: Where.
        limits: Of requests, and the key.
        template: How chats become text; None: no chats.
        max_tokens: Limit of new tokens of a request.
        max_rows: Limit of prompts x n of a request.
        waiting: Requests that may wait.
        timeout: Seconds that a request may take.
        rows: Continuations that the model makes at once.
        connections: What clients may keep open.
    """

    name: str
    address: Address = field(default_factory=Address)
    limits: Limits = field(default_factory=Limits)
    template: ChatTemplate | None = None
    max_tokens: int = 1024
    max_rows: int = 16
    waiting: int = 64
    timeout: float = 600.0
    rows: int = 16
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


def serve(generator: Generator, options: ServeOptions) -> None:
    """Answer requests until SIGINT or SIGTERM. Collective."""
    control = Control()
    if not control.leads:
        follow(generator, control)
        return
    engine = Engine(generator, control, options.waiting, options.timeout, options.rows)
    service = Service(engine, options.name, options.template, options.max_tokens, options.max_rows)
    app = create_app(service, options.limits)
    host, port = options.address.host, options.address.port
    config = uvicorn_config(app, host, port, options.connections)
    server = _Server(config)
    engine.on_failure = server.end
    server.run()
    if engine.error is not None:
        raise engine.error


class _Server(uvicorn.Server):
    """A server for which a signal is a reason to end well, and no error."""

    def end(self) -> None:
        """Answer no more requests; from any thread."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
