"""Run a function on N gloo ranks and get N results: ``pool.run(4, function, *args)``.

    def all_sum(value):                      # importable, top level of a module
        tensor = torch.tensor(float(value))
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    with RankPool() as pool:
        assert pool.run(2, all_sum, 3) == [6.0, 6.0]

Every call runs in fresh processes, forked within milliseconds from a server that has already
imported torch (and, with ``setup="mindspeed.megatron_adaptor"``, the adaptor and Megatron): see
:mod:`mindspeed.testing.rank_server`. A rank that raises, dies or hangs makes the call fail within
seconds with that rank's traceback, exit code or stack on top.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import io
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mindspeed.testing.rank_server import READY, Failure, RankRequest, Reply

DEFAULT_TIMEOUT = 60.0
MOST_SERVERS = 4  # of a pool, 0.4 GB each with Megatron; the one used least recently ends first
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_GLOO_LAZY_INIT": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MINDSPEED_DEVICE": "cpu",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
}
_ATTEMPTS = 3  # to reach a shared server that may be about to end
_SERVER_COMMAND = "import sys; from mindspeed.testing.rank_server import main; main(sys.argv[1:])"


class RankError(RuntimeError):
    """A rank raised, died or hung.

    Attributes:
        kind: "raised", "died" or "hung".
        original: the exception of that rank, if it can be pickled.
    """

    def __init__(self, function: str, world_size: int, failures: list[Failure]):
        first = failures[0]
        self.rank = first.rank
        self.kind = first.kind
        self.original: BaseException | None = None
        if first.exception is not None:
            with contextlib.suppress(Exception):
                self.original = pickle.loads(first.exception)
        parts = [f"{_headline(failure, function, world_size)}" for failure in failures]
        super().__init__("\n\n".join(parts))


class _Result(pickle.Unpickler):
    """A result: its types are imported as on the ranks, what they set up before.

    Megatron, which a result may be the first here to need, comes after the adaptor.
    """

    def __init__(self, file: io.BytesIO, setup: str) -> None:
        super().__init__(file)
        self._setup = setup

    def find_class(self, module: str, name: str) -> Any:
        foreign = module.partition(".")[0] != __package__.partition(".")[0]
        if self._setup and foreign and module not in sys.modules:
            importlib.import_module(self._setup)
        return super().find_class(module, name)


def _headline(failure: Failure, function: str, world_size: int) -> str:
    text = f"rank {failure.rank} of {world_size} {failure.kind} in {function}:\n{failure.text}"
    if failure.output.strip():
        text += f"\n--- output of rank {failure.rank}, last lines ---\n{failure.output.rstrip()}"
    return text


class RankPool:
    """Fork servers, started at first use; at most `MOST_SERVERS` are alive at once.

    Args:
        environment: variables of every rank, besides those that make gloo quiet and
            single-threaded on the loopback interface.
        shared: a directory with a short path; pools of several processes that name the same one
            have their servers in common, which outlive a pool by half a minute.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, shared: Path | None = None
    ) -> None:
        self._shared = shared
        self._environment = {**WORKER_ENVIRONMENT, **(environment or {})}
        self._servers: dict[str, _Server] = {}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        setup: str = "",
        timeout: float = DEFAULT_TIMEOUT,
        backend: str | None = "gloo",
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls `function(*args)` on `world_size` ranks and returns their results in rank order.

        Args:
            world_size: number of processes; each is a rank of one default process group.
            function: an importable function (top level of a module or a static method).
            *args: picklable; every rank gets its own copy.
            setup: a module imported once before anything else, such as
                "mindspeed.megatron_adaptor"; each value has its own server.
            timeout: seconds after which the call fails with the stacks of the ranks that hang; up
                to four times as many where other processes want the cores, too.
            backend: of the default process group; None when the function initialises it itself
                (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK are set).
            env: environment variables for this call only.

        Raises:
            RankError: a rank raised, died or hung; the root cause comes first.
        """
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, need at least 1")
        module = sys.modules[function.__module__]
        if "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} lives inside another function; ranks can only import "
                f"functions from the top level of a module"
            )
        request = RankRequest(
            world_size=world_size,
            module=function.__module__,
            file=getattr(module, "__file__", None),
            qualname=function.__qualname__,
            payload=pickle.dumps(args),
            timeout=timeout,
            backend=backend,
            env={"TMPDIR": tempfile.gettempdir(), **(env or {})},
            path=[os.path.abspath(entry) for entry in sys.path],
        )
        reply = self._server(setup).ask(request)
        if reply.failures:
            name = f"{function.__module__}:{function.__qualname__}"
            raise RankError(name, world_size, reply.failures)
        for rank, output in enumerate(reply.outputs):
            if output:
                print("".join(f"[rank {rank}] {line}\n" for line in output.splitlines()), end="")
        return [_Result(io.BytesIO(result), setup).load() for result in reply.results]

    def _server(self, setup: str) -> _Server:
        server = self._servers.pop(setup, None)
        if server is None or not server.alive():
            while len(self._servers) >= MOST_SERVERS:
                self._servers.pop(next(iter(self._servers))).close()
            if self._shared is None:
                server = _Server.start(setup, self._environment)
            else:
                server = _Server.shared(setup, self._environment, self._shared)
        self._servers[setup] = server  # the last one is the one used most recently
        return server

    def close(self) -> None:
        """End all servers and ranks."""
        while self._servers:
            self._servers.popitem()[1].close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class _Server:
    """The caller's end of a connection to a rank server, which it may have started."""

    def __init__(self, control: Connection, process: subprocess.Popen[bytes] | None = None):
        self._control, self._process = control, process

    @classmethod
    def start(cls, setup: str, environment: Mapping[str, str]) -> _Server:
        """A server of this process alone, which ends with the connection."""
        ours, theirs = socket.socketpair()
        process = _start(theirs, setup, environment)
        return cls(Connection(ours.detach()), process)

    @classmethod
    def shared(cls, setup: str, environment: Mapping[str, str], folder: Path) -> _Server:
        """A server of all processes that name the folder; the first one starts it."""
        key = hashlib.sha1(repr((setup, sorted(environment.items()))).encode()).hexdigest()[:12]
        path = folder / key
        for _ in range(_ATTEMPTS):
            with open(folder / f"{key}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                client = socket.socket(socket.AF_UNIX)
                try:
                    client.connect(str(path))
                except (FileNotFoundError, ConnectionRefusedError):  # none yet, or none any more
                    path.unlink(missing_ok=True)
                    listener = socket.socket(socket.AF_UNIX)
                    listener.bind(str(path))
                    listener.listen(64)
                    _start(listener, setup, environment).wait()
                    client.connect(str(path))
            control = Connection(client.detach())
            with contextlib.suppress(EOFError, ConnectionError):  # it was just about to end
                if control.recv_bytes() == READY:
                    return cls(control)
            control.close()
        raise RuntimeError(f"the rank server of {setup or 'torch'} ends at once: {path}")

    def alive(self) -> bool:
        ended = self._control.closed or self._control.poll()  # it never speaks between calls
        return not ended

    def ask(self, request: RankRequest) -> Reply:
        try:
            self._control.send_bytes(pickle.dumps(request))
            return pickle.loads(self._control.recv_bytes())
        except (EOFError, ConnectionError):
            self.close()
            code = "" if self._process is None else f" with exit code {self._process.returncode}"
            raise RuntimeError(
                f"the rank server ended{code}, its last words are on standard error"
            ) from None
        except BaseException:  # Ctrl-C in the middle of a call: the connection has lost its place
            self.close()
            raise

    def close(self) -> None:
        self._control.close()
        if self._process is None:
            return
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(
    theirs: socket.socket, setup: str, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a server with a socket, which is closed here."""
    names = [setup] if setup else []
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER_COMMAND, str(theirs.fileno()), *names],
        env={**os.environ, **environment, "PYTHONPATH": search_path},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the caller only, which then closes the server
    )
    theirs.close()
    return process


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """:meth:`RankPool.run` in a temporary pool, for scripts that call it once."""
    with RankPool() as pool:
        return pool.run(world_size, function, *args, **options)
