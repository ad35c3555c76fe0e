"""Connections: how long one may be open without a request, and how many there may be.

uvicorn waits for ever for the rest of a request's headers, answers what is no HTTP in plain text,
and counts idle connections as load. :class:`Connection` adds four rules to its HTTP protocol:

* a connection without a request under way is closed after ``idle_seconds``, also when it has sent
  a part of one (408)
* of an address with more than ``per_address`` connections, and of all when there are more than
  ``total``, the one that has been idle longest makes room; where all are busy, the new one's
  request is refused (429)
* a client that does not read its answer for ``send_seconds`` is cut off
* every refusal is JSON in OpenAI's form

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

from mindspeed.inference.server.guard import Receive, Refusal, Send, refuse


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may keep open.

    Attributes:
        per_address: Connections of one IP address.
        total: Connections of all.
        idle_seconds: Without a request under way; headers must be complete within them.
        send_seconds: In which a client reads a part of its answer.
    """

    per_address: int = 128
    total: int = 512
    idle_seconds: float = 15.0
    send_seconds: float = 30.0


def uvicorn_config(app: Any, host: str, port: int, limits: ConnectionLimits) -> uvicorn.Config:
    """How uvicorn serves ``app``: our connections, and clients under their own addresses."""
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
        limits: Of this and the others.
        table: All open connections, the longest idle first; busy ones are at the end.
    """

    def __init__(
        self, *args: Any, limits: ConnectionLimits, table: dict[Connection, None], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._table = limits, table
        self._application, self.app = self.app, self._answer
        self._deadline: asyncio.TimerHandle | None = None
        self._crowded = False

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or has more headers than h11 takes."""
        if self.cycle is not None and self.cycle.response_started:
            self.transport.close()  # the client has an answer already, or a part of it
        else:
            self._close_with(Refusal(400, f"this is no HTTP request that can be read: {msg}"))

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

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """The application, with our deadlines around it."""
        self._stop_waiting()
        self._table.pop(self, None)
        self._table[self] = None
        send = partial(self._send, send)
        try:
            if self._crowded:
                message = "too many requests of this address are under way; try again"
                await refuse(
                    Refusal(429, message, "rate_limit_error", "too_many_connections"), send
                )
            else:
                await self._application(scope, receive, send)
        finally:
            self._wait()

    async def _send(self, send: Send, message: Mapping[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._limits.send_seconds)
        except asyncio.TimeoutError:
            self.transport.abort()

    def _wait(self) -> None:
        """For the next request."""
        self._stop_waiting()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        self._table.pop(self, None)
        self._table[self] = None
        self._deadline = self.loop.call_later(self._limits.idle_seconds, self._expired)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        if not self.idle:  # a pipelined request began before its predecessor's end was seen
            return
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if begun and not self.transport.is_closing():
            seconds = self._limits.idle_seconds
            self._close_with(Refusal(408, f"no whole request came within {seconds:g} seconds"))
        self.transport.close()
        self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def _close_with(self, refusal: Refusal) -> None:
        body = json.dumps(refusal.content).encode()
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
