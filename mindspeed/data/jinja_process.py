"""A chat template in a child process with time and memory limits (:mod:`.jinja_renderer`).

    process = JinjaProcess("hf", source)
    process.render([{"messages": [...], "add_generation_prompt": False}])   # -> one text each

One child renders all conversations of a template: a request costs two messages over a socket. The
child ends with its owner, and is restarted after a template exceeded its limits and in a process
forked from its owner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mindspeed.data import jinja_renderer
from mindspeed.errors import ConfigError, DataError

SECONDS = 5  # CPU time per request; ordinary templates take less than a millisecond
MEMORY = 1 << 30  # bytes of address space
LENGTH = 16 << 20  # characters of all texts of a request
_UTF8_BYTES = 4


class JinjaProcess:
    """A compiled template.

    Args:
        name: name in messages.
        source: the Jinja program.

    Raises:
        DataError: it is not valid Jinja.
        ConfigError: compiling it exceeds the limits.
    """

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source
        self._child = self._start()

    def render(self, renderings: Sequence[Mapping[str, Any]]) -> list[str]:
        """Render the template with every mapping of variables, which must be JSON.

        Raises:
            DataError: the template refuses these variables, or fails with them.
            ConfigError: it exceeds the limits.
        """
        try:
            request = jinja_renderer.encoded({"renderings": list(renderings)})
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the chat template {self._name} takes text, numbers, lists and mappings: {error}"
            ) from error
        child = self._child
        if not child.usable:
            self._child = child = self._start()
        texts: list[str] = self._checked(child.request(request))["texts"]
        return texts

    def _start(self) -> _Child:
        child = _Child()
        self._checked(child.request(jinja_renderer.encoded({"source": self._source})))
        return child

    def _checked(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        if "error" not in reply:
            return reply
        problem = {
            jinja_renderer.REFUSED: "refuses the conversation: ",
            jinja_renderer.INVALID: "is not valid Jinja: ",
            jinja_renderer.FAILED: "fails: ",
            jinja_renderer.MEMORY: f"needs more than {MEMORY >> 20} MiB of memory",
            jinja_renderer.TOO_LONG: f"makes a text of more than {LENGTH >> 20} Mi characters",
            _TIME: f"needs more than {SECONDS} seconds of CPU time",
            _DEATH: "ended its process: ",
        }[reply["error"]]
        message = f"the chat template {self._name} {problem}{reply['message']}"
        if reply["error"] in _TEMPLATE_ERRORS:
            raise ConfigError(f"{message}: choose another --prompt-type, or a shorter conversation")
        raise DataError(message)


_TIME, _DEATH = "time", "death"
# Not specific to one conversation: the run ends instead of skipping the record.
_TEMPLATE_ERRORS = (_TIME, _DEATH, jinja_renderer.MEMORY, jinja_renderer.TOO_LONG)


class _Child:
    """The process, and the socket to it. One request at a time, from any thread."""

    def __init__(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._connection, theirs = Pipe()
        options = {
            "socket": theirs.fileno(),
            "path": _import_path(),
            "seconds": SECONDS,
            "memory": MEMORY,
            "length": LENGTH,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", jinja_renderer.__file__, json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._end = weakref.finalize(self, _end, self._connection, self._process, self._owner)

    @property
    def usable(self) -> bool:
        return self._owner == os.getpid() and self._end.alive

    def request(self, request: bytes) -> Mapping[str, Any]:
        with self._lock:
            try:
                self._connection.send_bytes(request)
                reply_bytes = self._connection.recv_bytes(LENGTH * _UTF8_BYTES + (1 << 20))
            except (EOFError, OSError):
                self._end()
                return _cause(self._process.returncode)
        reply: Mapping[str, Any] = json.loads(reply_bytes.decode("utf-8", "surrogatepass"))
        return reply


def _cause(status: int) -> Mapping[str, Any]:
    if status == -signal.SIGPROF:
        return {"error": _TIME, "message": ""}
    return {"error": _DEATH, "message": f"status {status}"}


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    """Close the socket, which ends the child. A forked process only closes its copy."""
    connection.close()
    if os.getpid() == owner:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:  # still rendering, but its owner is gone
            process.kill()
            process.wait()


def _import_path() -> list[str]:
    """Import path of Jinja for the child, which has neither environment nor site-packages."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    paths = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    return list(dict.fromkeys(paths))
