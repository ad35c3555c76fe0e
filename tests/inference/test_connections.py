"""Connections of the server, on real sockets: deadlines, limits, JSON whatever a client sends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.support.lazy import needs

needs("fastapi")

import uvicorn

from mindspeed.inference.server.limits import (
    AccessMiddleware,
    ConnectionLimits,
    RequestLimits,
    uvicorn_config,
)

HEAD = "HTTP/1.1\r\nHost: localhost\r\n"
GET = f"GET /hello {HEAD}\r\n".encode()
QUICK = ConnectionLimits(per_address=8, total=12, idle_seconds=0.3, send_seconds=0.5)


async def application(scope, receive, send):
    """/wait answers when it may, /long with more than buffers hold, others at once."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    headers = [(b"content-type", b"application/json")]
    if scope["path"] != "/long":
        headers.append((b"content-length", b"7"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/wait":
        while not application.go_on.is_set():
            await asyncio.sleep(0.01)
    for _ in range(400 if scope["path"] == "/long" else 0):
        await send({"type": "http.response.body", "body": b" " * (1 << 16), "more_body": True})
        application.sent += 1
    await send({"type": "http.response.body", "body": b'"hello"', "more_body": False})


@contextmanager
def serving(limits):
    """The port of a server in a thread."""
    application.go_on, application.sent = threading.Event(), 0
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn_config(AccessMiddleware(application, RequestLimits()), "127.0.0.1", 0, limits)
    config.log_config = None
    server = uvicorn.Server(config)
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        application.go_on.set()
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


@contextmanager
def connected(port, text=b"", address="127.0.0.1"):
    with socket.create_connection(("127.0.0.1", port), 10, (address, 0)) as client:
        client.sendall(text)
        yield client


def answer(client):
    """Status and JSON of one answer, None where the connection was closed without."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            if not (more := client.recv(65536)):
                return None
            data += more
    except ConnectionResetError:
        return None
    head, _, body = data.partition(b"\r\n\r\n")
    while True:
        try:
            return int(head.split()[1]), json.loads(body)
        except ValueError:
            more = client.recv(65536)
            assert more, data
            body += more


def closed(client):
    """Whether the other side has closed, or closes."""
    try:
        return client.recv(65536) == b""
    except ConnectionResetError:
        return True


UNFINISHED = {
    "nothing": b"",
    "a method": b"GET",
    "a header": f"GET / {HEAD}X-Long: ".encode(),
    "all but the end": f"GET / {HEAD}".encode(),
}


@pytest.mark.parametrize("case", UNFINISHED)
def test_unfinished_headers_have_a_deadline(case):
    with serving(QUICK) as port, connected(port, UNFINISHED[case]) as client:
        if UNFINISHED[case]:
            status, content = answer(client)
            assert status == 408 and "within 0.3 seconds" in content["error"]["message"]
        assert closed(client)


def test_dripping_headers_do_not_move_the_deadline():
    with serving(QUICK) as port, connected(port, GET) as client:
        assert answer(client) == (200, "hello")  # the second request of a connection, too
        client.sendall(f"GET / {HEAD}X: ".encode())
        client.settimeout(0.05)
        for _ in range(400):
            with suppress(TimeoutError):
                break_off = client.recv(9)
                break
            client.sendall(b"x")
        assert break_off == b"HTTP/1.1 "


def test_a_body_that_nobody_reads_has_the_same_deadline():
    """The request is refused by its headers; its body goes on dripping."""
    head = f"POST /x {HEAD}Content-Type: text/plain\r\nContent-Length: 99\r\n\r\n".encode()
    with serving(QUICK) as port, connected(port, head) as client:
        assert answer(client)[0] == 415
        assert closed(client)


def test_a_request_under_way_has_no_such_deadline():
    with serving(QUICK) as port, connected(port, f"GET /wait {HEAD}\r\n".encode()) as client:
        time.sleep(1.0)
        application.go_on.set()
        assert answer(client) == (200, "hello")


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off():
    with serving(QUICK) as port, connected(port, f"GET /long {HEAD}\r\n".encode()) as client:
        deadline = time.monotonic() + 20
        before = -1
        while application.sent != before and time.monotonic() < deadline:
            before = application.sent
            time.sleep(1.0)
        read = 0
        try:
            while data := client.recv(1 << 20):
                read += len(data)
        except ConnectionResetError:
            pass
        assert read < 400 << 16


def test_idle_connections_make_room_and_every_request_is_answered():
    """350 idle ones of one address, then of several: the idle ones go, requests do not notice."""
    limits = ConnectionLimits(per_address=100, total=200, idle_seconds=60)
    with serving(limits) as port, ExitStack() as stack:
        for number in range(350):
            address = f"127.0.0.{1 + number % 4}" if number > 150 else "127.0.0.1"
            stack.enter_context(connected(port, b"GET / HT" * (number % 2), address))
            if number % 50 == 0:
                with connected(port, GET) as client:
                    assert answer(client) == (200, "hello")
        with connected(port, GET) as client:
            assert answer(client) == (200, "hello")


def test_too_many_busy_connections_are_refused_in_json():
    with serving(QUICK) as port, ExitStack() as stack:
        wait = f"GET /wait {HEAD}\r\n".encode()
        busy = [stack.enter_context(connected(port, wait)) for _ in range(QUICK.per_address)]
        for client in busy:
            assert client.recv(5) == b"HTTP/"  # it is under way
        with connected(port, GET) as client:
            status, content = answer(client)
            assert (status, content["error"]["code"]) == (429, "too_many_connections")
            assert closed(client)
        with connected(port, GET, "127.0.0.9") as client:  # another address
            assert answer(client) == (200, "hello")
        application.go_on.set()
        with connected(port, GET) as client:
            assert answer(client) is not None


NO_HTTP = {
    "noise": b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two lengths": f"GET / {HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\n".encode(),
    "endless header": f"GET / {HEAD}X: ".encode() + b"x" * (1 << 17),
    "bad chunk": f"POST / {HEAD}Content-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
}


@pytest.mark.parametrize("case", NO_HTTP)
def test_invalid_http_is_a_json_error(case):
    with serving(QUICK) as port, connected(port, NO_HTTP[case]) as client:
        status, content = answer(client)
        assert status == 400
        assert set(content["error"]) == {"message", "type", "param", "code"}


def test_an_upgrade_is_an_ordinary_request():
    upgrade = f"GET / {HEAD}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
    with serving(QUICK) as port, connected(port, upgrade) as client:
        assert answer(client) == (200, "hello")


def test_many_requests_on_one_connection_and_pipelined_ones_are_answered():
    with serving(QUICK) as port:
        with connected(port) as client:
            for _ in range(20):
                client.sendall(GET)
                assert answer(client) == (200, "hello")
        with connected(port, GET * 5) as client:
            data = b""
            while data.count(b'"hello"') < 5:
                data += client.recv(65536)
