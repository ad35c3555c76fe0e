"""Access control and limits: of requests, checked before one is parsed, and of open connections.

* API key, compared in constant time, if one is set; the health check needs none
* without a key only ``Host`` names of this machine, so that no web page can reach a server on the
  loopback interface under its own domain (DNS rebinding)
* JSON content type only, for the same reason: browsers send other types without a preflight request
* limited size of a body and limited time to receive it

A plain ASGI middleware: it sees the bytes before any parser does.

uvicorn waits forever for the rest of a request's headers, answers malformed HTTP in plain text, and
counts idle connections as load. :class:`Connection` adds four rules to its HTTP protocol:

* a connection without an active request is closed after ``idle_seconds``, also when it has sent
  part of one (408)
* with more than ``per_address`` connections from one address, or more than ``total``, the one that
  has been idle longest is closed; if all are busy, the new connection's request is refused (429)
* a connection whose client does not read its response for ``send_seconds`` is aborted
* every error is JSON in OpenAI's format

Behind a proxy all clients have the proxy's address: raise ``per_address`` there.

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
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PUBLIC_PATHS = ("/health",)

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a request.

    Attributes:
        api_key: Clients send ``Authorization: Bearer <key>``; None: no key, this machine only.
        body_bytes: Maximum size of the body.
        body_seconds: Maximum time to receive the body.
    """

    api_key: str | None = None
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0


class ApiError(Exception):
    """An error response in OpenAI's format.

    Args:
        status: HTTP status.
        message: For the user.
        kind: OpenAI's error type.
        code: OpenAI's error code.
        param: The invalid field.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class AccessMiddleware:
    """ASGI middleware that forwards allowed requests to ``app`` and answers the others itself."""

    def __init__(self, app: Any, limits: RequestLimits) -> None:
        self._app, self._limits = app, limits
        key = limits.api_key
        self._digest = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            if scope["path"] not in _PUBLIC_PATHS:
                self._check_key(headers)
            if scope["method"] == "POST":
                receive = await self._with_body(headers, receive)
        except ApiError as error:
            await send_error(error, send)
            return
        await self._app(scope, receive, send)

    def _check_key(self, headers: Mapping[bytes, bytes]) -> None:
        if self._digest is None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rsplit(":", 1)[0]
            if name not in _LOOPBACK:
                raise ApiError(
                    403, "without an API key only requests to localhost are answered", code="host"
                )
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        valid = hmac.compare_digest(_digest(key.strip()), self._digest)
        if scheme.lower() != b"bearer" or not valid:
            raise ApiError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def _with_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> Receive:
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "send JSON with the header Content-Type: application/json")
        limit = self._limits.body_bytes
        too_large = ApiError(413, f"the request is larger than {limit:,} bytes")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        seconds = self._limits.body_seconds
        try:
            body = await asyncio.wait_for(_read(receive, limit), seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408, f"the request body did not arrive within {seconds:g} seconds"
            ) from None
        if body is None:
            raise too_large
        return _replayed(body, receive)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body; None if it is larger than ``limit``."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client disconnected")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            return None
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Replay the body as one message, then forward the server's messages (disconnect)."""
    pending: list[Mapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Mapping[str, Any]:
        return pending.pop() if pending else await receive()

    return again


def _digest(key: bytes) -> bytes:
    """A digest of fixed length, so that the comparison does not leak the key's length."""
    return hashlib.sha256(key).digest()


async def send_error(error: ApiError, send: Send) -> None:
    """Send an error response."""
    body = json.dumps(error.content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413, 429):
        headers.append((b"connection", b"close"))  # the rest of the body is unread
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
