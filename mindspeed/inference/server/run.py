"""The server process: rank 0 serves HTTP until SIGINT or SIGTERM, the other ranks follow it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from mindspeed.data.chat_template import ChatTemplate
from mindspeed.inference.answers.call_formats import CallFormat
from mindspeed.inference.parallel_groups import Rank0Broadcast
from mindspeed.inference.prefix_cache import why_not_shared
from mindspeed.inference.server.app import Service, create_app
from mindspeed.inference.server.engine import Engine, follow
from mindspeed.inference.server.limits import ConnectionLimits, RequestLimits, uvicorn_config
from mindspeed.inference.text_generator import TextGenerator


@dataclass(frozen=True)
class Address:
    """Host and port that the server listens on."""

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True)
class ServeOptions:
    """Settings of the server.

    Attributes:
        name: Model name that clients use.
        address: Where it listens.
        limits: API key and limits of requests.
        template: Chat template; None: no chat completions.
        max_tokens: Maximum new tokens of a request.
        max_sequences: Maximum of prompts x n of a request.
        max_queue: Requests that may wait.
        timeout: Seconds that a request may take.
        max_batch_size: Sequences that are decoded at once.
        connections: Limits on open connections.
        calls: How the model writes calls of tools; None: in no known way.
        defaults: Values of fields that a request leaves out.
        prefix_bytes: Of keys and values that requests leave for those that begin alike.
    """

    name: str
    address: Address = field(default_factory=Address)
    limits: RequestLimits = field(default_factory=RequestLimits)
    template: ChatTemplate | None = None
    max_tokens: int = 1024
    max_sequences: int = 16
    max_queue: int = 64
    timeout: float = 600.0
    max_batch_size: int = 16
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    calls: CallFormat | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix_bytes: int = 0


def serve(generator: TextGenerator, options: ServeOptions) -> None:
    """Answer requests until SIGINT or SIGTERM. Collective."""
    control = Rank0Broadcast()
    if not control.is_source:
        follow(generator, control, options.prefix_bytes)
        return
    engine = Engine(
        generator,
        control,
        options.max_queue,
        options.timeout,
        options.max_batch_size,
        options.prefix_bytes,
    )
    service = Service(
        engine,
        options.name,
        options.template,
        options.max_tokens,
        options.max_sequences,
        options.calls,
        options.defaults,
    )
    app = create_app(service, options.limits)
    host, port = options.address.host, options.address.port
    config = uvicorn_config(app, host, port, options.connections)
    log = logging.getLogger("uvicorn.error")
    if options.defaults:
        log.info("defaults of generation_config.json: %s", dict(options.defaults))
    if options.template is not None and options.template.renders_tools:
        name = options.calls.name if options.calls else "unknown, see --tool-call-parser"
        log.info("format of calls of tools: %s", name)
    if options.prefix_bytes and (reason := why_not_shared(generator.stage)):
        log.info("no prefix cache: %s", reason)
    server = _Server(config)
    engine.on_failure = server.end
    server.run()
    if engine.error is not None:
        raise engine.error


class _Server(uvicorn.Server):
    """A server that shuts down cleanly on a signal instead of raising it again."""

    def end(self) -> None:
        """Stop serving; callable from any thread."""
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
