"""Fork server for test ranks: imports torch once, then forks one fresh process per rank.

    caller (pytest) --request--> server --fork--> rank 0 .. rank n-1
           <----- results or the first failure -----

Importing torch and Megatron costs seconds, forking a process that has already done so costs
milliseconds and shares its memory. The server therefore lives for a whole test session, while
every call gets new processes: no Megatron global, RNG state, environment variable, patched function
or unfinished collective can leak from one test into the next, and a crashed or hanging rank is
killed.

The server does not unpickle arguments or results and runs no thread, so forking is safe. It exits,
with all ranks, when its caller closes the connection or dies. One that several callers share forks
a copy of itself for each, and exits when none has been there for a while. Only
:mod:`mindspeed.testing.ranks` starts it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from mindspeed.processes import cores, die_with_parent, free_port

STACK_DUMP_SIGNAL = signal.SIGUSR1


def settle_child(output: Path, stacks: Path) -> None:
    """Set up a forked child: it can be killed, writes to a file, and dumps its stacks.

    The child leads its own process group, dies with its parent, writes its output to
    `output`, and on STACK_DUMP_SIGNAL writes the stacks of all its threads to `stacks`.
    """
    os.setpgid(0, 0)
    die_with_parent()
    _redirect_output(output)
    stack_file = open(stacks, "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_DUMP_SIGNAL, file=stack_file, all_threads=True)


def _redirect_output(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def kill_child(pid: int) -> None:
    """Kill a child and its child processes, and wait for its end."""
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def exit_text(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def tail(path: Path, size: int) -> str:
    """The last `size` bytes of a file as text; nothing if the file does not exist."""
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


GRACE_SECONDS = 0.3  # after a first failure: time for the root cause to overtake its consequences
OUTPUT_TAIL_BYTES = 20_000
IDLE_SECONDS = 30.0  # a shared server without callers ends then
READY = b"ready"  # to the caller of a shared server
MOST_CROWDED = 4.0  # a load that is not this machine's own does not stretch a hang without end
# Imported before the first fork: the first optimizer or dispatch mode of a process imports dynamo.
WARM_MODULES = ("torch.distributed", "torch._dynamo", "mindspeed.testing")


@dataclass(frozen=True)
class RankRequest:
    """One call: the function, the number of ranks, the limits."""

    world_size: int
    module: str
    file: str | None
    qualname: str
    payload: bytes  # pickled positional arguments, opened by the ranks only
    timeout: float
    backend: str | None
    env: dict[str, str]
    path: list[str]


@dataclass(frozen=True)
class Failure:
    """The reason why a rank did not return a result."""

    rank: int
    kind: str  # "raised", "died" or "hung"
    text: str
    output: str = ""
    exception: bytes | None = None  # pickled, when the exception allows it


@dataclass(frozen=True)
class Reply:
    """Sent to the caller: a pickled result per rank, or failures with the root cause first."""

    results: list[bytes] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    """The server's record of a forked process."""

    rank: int
    pid: int
    connection: Connection
    result: bytes | None = None
    failure: Failure | None = None
    failed_at: float = 0.0


def load_module(name: str, file: str | None) -> ModuleType:
    """Returns the module called `name` whose source is `file`, importing it when needed."""
    alias = "__main__" if name == "__main__" else name
    module = sys.modules.get(alias)
    if module is None and alias != "__main__":
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(alias)
    if module is not None and (file is None or _same_file(module, file)):
        return module
    if file is None:
        raise ModuleNotFoundError(f"no module named {name!r} and no source file to load it from")
    spec = importlib.util.spec_from_file_location(
        "__ranks_main__" if name == "__main__" else name, file
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _same_file(module: ModuleType, file: str) -> bool:
    own = getattr(module, "__file__", None)
    return own is not None and os.path.realpath(own) == os.path.realpath(file)


# --------------------------------------------------------------------------------------- one rank


def _be_a_rank(
    rank: int, request: RankRequest, port: int, folder: Path, connection: Connection
) -> None:
    """Body of a forked process; never returns."""
    settle_child(folder / f"output{rank}", folder / f"stacks{rank}")
    try:
        result = _call(rank, request, port, folder)
        message: tuple[str, Any] = ("result", pickle.dumps(result))
    except BaseException as error:
        message = ("failure", (time.monotonic(), traceback.format_exc(), _pickled(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, EOFError):
        connection.send_bytes(pickle.dumps(message))
        connection.recv_bytes()  # peers may still need this rank's sockets; the server says when
    os._exit(0)


def _call(rank: int, request: RankRequest, port: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    launched = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(request.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.update(launched | dict(request.env))
    tempfile.tempdir = None  # found again: that of the caller
    torch.set_num_threads(1)
    random.seed(1234)
    torch.manual_seed(1234)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1234)
    if request.backend is not None:
        store = dist.FileStore(str(folder / "store"), request.world_size)
        dist.init_process_group(
            request.backend, store=store, rank=rank, world_size=request.world_size
        )
    function: Any = load_module(request.module, request.file)
    for name in request.qualname.split("."):
        function = getattr(function, name)
    return function(*pickle.loads(request.payload))


def _pickled(error: BaseException) -> bytes | None:
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    return None


# ------------------------------------------------------------------------------------- the server


def _crowding() -> float:
    """How many processes want each core, from 1 to `MOST_CROWDED`."""
    return min(MOST_CROWDED, max(1.0, os.getloadavg()[0] / cores()))


class _Supervisor:
    """Forks the ranks of one request and watches them until all returned or one failed."""

    def __init__(self, request: RankRequest, control: Connection, folder: Path):
        self.request = request
        self.control = control
        self.folder = folder
        self.ranks: list[_Rank] = []

    def run(self) -> Reply:
        try:
            self._fork_all()
            start, timeout = time.monotonic(), self.request.timeout
            self._watch(lambda: start + timeout * _crowding(), until_first_failure=True)
            if any(rank.failure for rank in self.ranks):
                end = time.monotonic() + GRACE_SECONDS
                self._watch(lambda: end, until_first_failure=False)
            elif self._pending():
                self._note_hang()
            return self._reply()
        finally:
            self._end_all()

    def _fork_all(self) -> None:
        port = free_port()
        for rank in range(self.request.world_size):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                self.control.close()
                for other in self.ranks:
                    other.connection.close()
                connection = Connection(theirs.detach())
                _be_a_rank(rank, self.request, port, self.folder, connection)
            theirs.close()
            self.ranks.append(_Rank(rank, pid, Connection(ours.detach())))

    def _pending(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.result is None and rank.failure is None]

    def _watch(self, deadline: Callable[[], float], until_first_failure: bool) -> None:
        while pending := self._pending():
            remaining = deadline() - time.monotonic()
            if remaining <= 0:
                return
            by_connection: dict[Any, _Rank] = {rank.connection: rank for rank in pending}
            for ready in wait([self.control, *by_connection], remaining):
                if ready is self.control:
                    raise EOFError("the caller has gone")  # it never speaks during a call
                self._receive(by_connection[ready])
            if until_first_failure and any(rank.failure for rank in self.ranks):
                return

    def _receive(self, rank: _Rank) -> None:
        try:
            kind, content = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, ConnectionError):
            _, status = os.waitpid(rank.pid, 0)
            text = f"{exit_text(status)} before returning a result"
            rank.failure = Failure(rank.rank, "died", text, self._output(rank))
            return
        if kind == "result":
            rank.result = content
        else:
            rank.failed_at, text, exception = content
            rank.failure = Failure(rank.rank, "raised", text, self._output(rank), exception)

    def _note_hang(self) -> None:
        """Request a stack dump of every rank that has not answered."""
        pending = self._pending()
        for rank in pending:
            os.kill(rank.pid, STACK_DUMP_SIGNAL)
        time.sleep(0.5)
        for rank in pending:
            stacks = (self.folder / f"stacks{rank.rank}").read_text(errors="replace")
            rank.failure = Failure(rank.rank, "hung", stacks, self._output(rank))

    def _reply(self) -> Reply:
        failed = [rank for rank in self.ranks if rank.failure is not None]
        # A dead process is the cause of broken connections of other ranks, so it comes first.
        failed.sort(key=lambda rank: (rank.failed_at, rank.rank))
        if failed:
            return Reply(failures=[rank.failure for rank in failed if rank.failure is not None])
        return Reply(
            results=[rank.result for rank in self.ranks if rank.result is not None],
            outputs=[self._output(rank) for rank in self.ranks],
        )

    def _output(self, rank: _Rank) -> str:
        return tail(self.folder / f"output{rank.rank}", OUTPUT_TAIL_BYTES)

    def _end_all(self) -> None:
        """Kill each rank with all its child processes."""
        for rank in self.ranks:
            kill_child(rank.pid)
            rank.connection.close()


def _serve(control: Connection, setup_failures: list[Failure]) -> None:
    while True:
        request: RankRequest = pickle.loads(control.recv_bytes())
        reply = Reply(failures=setup_failures) if setup_failures else _answer(request, control)
        control.send_bytes(pickle.dumps(reply))


def _answer(request: RankRequest, control: Connection) -> Reply:
    sys.path[:] = request.path
    try:
        load_module(request.module, request.file)
    except BaseException:
        return Reply(failures=[Failure(0, "raised", traceback.format_exc())])
    gc.freeze()  # a collection in a rank would write to, and so copy, every page of the server
    where = request.env["TMPDIR"]
    with tempfile.TemporaryDirectory(prefix="mindspeed-ranks-", dir=where) as folder:
        return _Supervisor(request, control, Path(folder)).run()


def _share(listener: socket.socket, setup_failures: list[Failure]) -> None:
    """Serve each caller in a copy of this process.

    Until there has been none for a while, or the socket is removed.
    """
    path, callers, end = listener.getsockname(), set[int](), time.monotonic() + IDLE_SECONDS
    while os.path.exists(path) and (callers or time.monotonic() < end):
        for pid in list(callers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                callers.remove(pid)
                end = time.monotonic() + IDLE_SECONDS
        if not select.select([listener], [], [], 0.5)[0]:
            continue
        connection, _ = listener.accept()
        if (pid := os.fork()) == 0:
            listener.close()
            die_with_parent()
            control = Connection(connection.detach())
            with contextlib.suppress(EOFError, ConnectionError):
                control.send_bytes(READY)
                _serve(control, setup_failures)
            os._exit(0)
        connection.close()
        callers.add(pid)


def main(argv: list[str]) -> None:
    """Serves requests on socket `argv[0]` after importing the modules `argv[1:]`.

    The socket is connected to the one caller, or callers connect to it; then no caller waits for
    the end of this process.
    """
    own = socket.socket(fileno=int(argv[0]))
    shared = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if shared and os.fork():
        os._exit(0)
    failures = _import_failures([*WARM_MODULES, *argv[1:]])
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        if shared:
            _share(own, failures)
        else:
            _serve(Connection(own.detach()), failures)
    os._exit(0)  # nothing to tear down, and torch would take a second for it


def _import_failures(names: list[str]) -> list[Failure]:
    try:
        for name in names:
            importlib.import_module(name)
    except BaseException:
        return [Failure(0, "raised", traceback.format_exc())]
    return []
