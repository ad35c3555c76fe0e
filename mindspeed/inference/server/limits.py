"""Access control and request limits, checked before a request is parsed.

* API key, compared in constant time, if one is set; the health check needs none
* without a key only ``Host`` names of this machine, so that no web page can reach a server on the
  loopback interface under its own domain (DNS rebinding)
* JSON content type only, for the same reason: browsers send other types without a preflight request
* limited size of a body and limited time to receive it

A plain ASGI middleware: it sees the bytes before any parser does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
