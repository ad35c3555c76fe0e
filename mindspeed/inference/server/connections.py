"""Limits on open connections: how long one may be idle, and how many there may be.

uvicorn waits forever for the rest of a request's headers, answers malformed HTTP in plain text, and
counts idle connections as load. :class:`Connection` adds four rules to its HTTP protocol:

* a connection without an active request is closed after ``idle_seconds``, also when it has sent
  part of one (408)
* with more than ``per_address`` connections from one address, or more than ``total``, the one that
  has been idle longest is closed; if all are busy, the new connection's request is refused (429)
* a connection whose client does not read its response for ``send_seconds`` is aborted
* every error is JSON in OpenAI's format

Behind a proxy all clients have the proxy's address: raise ``per_address`` there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mindspeed.inference.server.middleware import ApiError, Receive, Send, send_error


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on open connections.

    Attributes:
        per_address: Maximum connections from one IP address.
        total: Maximum connections.
        idle_seconds: Maximum time without an active request, and to receive all headers.
        send_seconds: Maximum time in which a client reads nothing of its response.
    """

    per_address: int = 128
    total: int = 512
    idle_seconds: float = 15.0
    send_seconds: float = 30.0


def uvicorn_config(app: Any, host: str, port: int, limits: ConnectionLimits) -> uvicorn.Config:
    """uvicorn's configuration: our connection class, no proxy headers."""
    return uvicorn.Config(
        app,
        host,
        port,
        http=partial(Connection, limits=limits, table={}),  # type: ignore[arg-type]
        ws="none",
        log_level="info",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=10,
    )


class Connection(H11Protocol):
    """One connection.

    Args:
        limits: Limits on all connections.
        table: All open connections, shared between them: longest idle first, busy ones last.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, table: dict[Connection, None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._table = limits, table
        self._application, self.app = self.app, self._respond
        self._deadline: asyncio.TimerHandle | None = None
        self._crowded = False

    @property
    def idle(self) -> bool:
        """Whether no request is active."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_idle_timer()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.pop(self, None)
        self._stop_idle_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called for malformed HTTP or more headers than h11 accepts."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.close()  # the client already has part of a response
        else:
            self._close_with(ApiError(400, f"malformed HTTP request: {msg}"))

    def _make_room(self) -> None:
        address = self.client and self.client[0]
        same = [other for other in self._table if (other.client and other.client[0]) == address]
        if len(same) > self._limits.per_address:
            candidates = same
        elif len(self._table) > self._limits.total:
            candidates = list(self._table)
        else:
            return
        for other in candidates:
            if other.idle and other is not self:
                other.transport.abort()
                self._table.pop(other, None)
                return
        self._crowded = True

    async def _respond(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Run the application with our deadlines."""
        self._stop_idle_timer()
        self._table.pop(self, None)
        self._table[self] = None
        send = partial(self._send, send)
        try:
            if self._crowded:
                message = "too many active requests from this address; try again"
                await send_error(
                    ApiError(429, message, "rate_limit_error", "too_many_connections"), send
                )
            else:
                await self._application(scope, receive, send)
        finally:
            self._start_idle_timer()

    async def _send(self, send: Send, message: Mapping[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._limits.send_seconds)
        except asyncio.TimeoutError:
            self.transport.abort()

    def _start_idle_timer(self) -> None:
        """Start the idle timer for the next request."""
        self._stop_idle_timer()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        self._table.pop(self, None)
        self._table[self] = None
        self._deadline = self.loop.call_later(self._limits.idle_seconds, self._expired)

    def _stop_idle_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        if not self.idle:  # a pipelined request began before the end of the previous one was seen
            return
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun and not self.transport.is_closing():
            seconds = self._limits.idle_seconds
            self._close_with(
                ApiError(408, f"no complete request arrived within {seconds:g} seconds")
            )
        self.transport.close()
        self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def _close_with(self, error: ApiError) -> None:
        body = json.dumps(error.content).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
