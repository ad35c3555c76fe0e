"""Call functions in forked children, so that each call starts from the same process state.

    step = call(count_step, settings.args, 0)
    for found in map(count_step, arguments, jobs=4):  # in the order of the arguments
        ...                                           # a result, or the MindSpeedError of its call

Megatron keeps process groups, random states and micro-batch counts in globals, and features change
modules. A child inherits all imports and changes its copy only; its result is pickled. Its output
is shown in the error of a crash and dropped otherwise.

The parent must not have started threads that hold locks, nor initialised an accelerator.
"""

from __future__ import annotations

import builtins
import gc
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, NoReturn

from mindspeed.adaptor.versions import at_least, megatron_version
from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.processes import die_with_parent, no_collection

in_child = False
"""Whether this process is a child, whose inherited objects are frozen: counting them takes long."""
_LAST_LINES = 12
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def import_ahead() -> None:
    """Import the modules of every run before its processes are forked.

    Raises:
        PlanError: the installed Megatron is too old to be counted.
    """
    if not at_least("0.15"):
        raise PlanError(
            f"jobs are planned (--dry-run, too) with megatron-core 0.15.3 and newer, not with "
            f"{megatron_version()}: install megatron-core 0.16.1"
        )
    with no_collection():
        import mindspeed.megatron_adaptor  # noqa: I001 - before megatron.core

        import torch._dynamo  # noqa: F401 - FakeTensorMode reads its settings
        import mindspeed.optimizer.megatron
        import mindspeed.pipeline.schedule.megatron_work
        import mindspeed.planner.count.balanced_routing
        import mindspeed.planner.count.loop
        import mindspeed.training.model
        import mindspeed.training.pretrain
        import mindspeed.training.setup
        import mindspeed.training.step  # noqa: F401


def call(function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
    """Call ``function(*args)`` in a child; the result must be picklable.

    Args:
        function: any callable, including closures.
        args: arguments; inherited, not pickled.

    Raises:
        MindSpeedError: as raised by the function.
        PlanError: any other exception, a crash, or a timeout.
    """
    [result] = map(function, [args], timeout=timeout)
    if isinstance(result, MindSpeedError):
        raise result
    return result


def map(
    function: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    jobs: int = 1,
    timeout: float | None = None,
) -> Iterator[Any]:
    """Call ``function(*each)`` for each of the arguments, in children; yields results in order.

    A call that fails yields its :class:`~mindspeed.errors.MindSpeedError` in place of the result.
    Arguments are consumed when a child is free. Leaving the iterator, also by Ctrl-C, kills the
    children; on Linux they also end with a parent that is killed.

    Args:
        jobs: number of concurrent children.
    """
    waiting = enumerate(arguments)
    running: dict[int, _Child] = {}
    done: dict[int, Any] = {}
    following = 0  # index of the next result to yield
    exhausted = False
    try:
        while True:
            while not exhausted and len(running) < builtins.max(1, jobs):
                drawn = next(waiting, None)
                if drawn is None:
                    exhausted = True
                    break
                with _no_signals():  # until the child ignores them and is among those to kill
                    running[drawn[0]] = _Child.start(function, drawn[1], timeout)
            while following in done:
                yield done.pop(following)
                following += 1
            if not running:
                if exhausted:
                    return
                continue
            for index in _finished(running):
                done[index] = running.pop(index).result()
    finally:
        for child in running.values():
            child.kill()


def _finished(running: dict[int, _Child]) -> list[int]:
    """Read results until a child ends or times out; the indices of such children."""
    while True:
        with selectors.DefaultSelector() as selector:
            for index, child in running.items():
                selector.register(child.pipe, selectors.EVENT_READ, index)
            times = [left for child in running.values() if (left := child.left()) is not None]
            ready = selector.select(max(0.0, min(times)) if times else None)
        found = [key.data for key, _ in ready if running[key.data].read()]
        found += [
            index
            for index, child in running.items()
            if index not in found and (left := child.left()) is not None and left <= 0
        ]
        if found:
            return found


@contextmanager
def _no_signals() -> Iterator[None]:
    """Block signals that end the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Child:
    """A forked process that computes one result.

    Attributes:
        process: process id.
        pipe: file descriptor of the pickled result.
        output: file with what the child prints.
        timeout: seconds until it is killed; None: never.
        end: monotonic time at which it is killed.
        received: pickled result so far.
        closed: whether the child has closed the pipe.
    """

    process: int
    pipe: int
    output: IO[bytes]
    timeout: float | None
    end: float | None
    received: bytearray = field(default_factory=bytearray)
    closed: bool = False

    @classmethod
    def start(
        cls, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> _Child:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        reader, writer = os.pipe()
        parent, process = os.getpid(), os.fork()
        if process == 0:
            os.close(reader)
            _end_with(parent)
            _run(function, args, writer, output)
        os.close(writer)
        end = None if timeout is None else time.monotonic() + timeout
        return cls(process, reader, output, timeout, end)

    def left(self) -> float | None:
        """Seconds until the timeout."""
        return None if self.end is None else self.end - time.monotonic()

    def read(self) -> bool:
        """Read available bytes; True at the end."""
        part = os.read(self.pipe, 1 << 20)
        self.received += part
        self.closed = not part
        return self.closed

    def kill(self) -> int:
        """Kill the process; its wait status."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        return self._reap()

    def _reap(self) -> int:
        os.close(self.pipe)
        return os.waitpid(self.process, 0)[1]

    def result(self) -> Any:
        """The function's return value, or the error of the call."""
        if not self.closed:
            self.kill()
            return self._error(f"is not finished after {self.timeout:g} s")
        status = self._reap()
        try:
            result = pickle.loads(self.received)
        except Exception:  # nothing, or a part: the process died
            code = os.waitstatus_to_exitcode(status)
            return self._error(
                f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            )
        self.output.close()
        return result

    def _error(self, what: str) -> PlanError:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        self.output.close()
        text = "".join(f"\n    {line}" for line in lines)
        printed = f"; it printed last:{text}" if text else ""
        return PlanError(f"a process that counts {what}{printed}")


def _end_with(parent: int) -> None:
    """End this child when its parent is killed."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], writer: int, output: IO[bytes]
) -> NoReturn:
    """Run the child, which exits here, without the exit handlers of the parent."""
    code = 1
    try:
        for number in _SIGNALS:  # handled by the parent, which kills its children
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
        global in_child
        in_child = True
        gc.freeze()  # collecting the parent's objects would copy their pages
        message = _message(function, args)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(message)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _message(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(function(*args))
    except MindSpeedError as error:
        return _pickled(error)
    except Exception as error:
        return pickle.dumps(PlanError(_described(error)))


def _pickled(error: MindSpeedError) -> bytes:
    """Pickle an error without its traceback, as a PlanError if its class cannot be pickled."""
    try:
        message = pickle.dumps(error)
        pickle.loads(message)
    except Exception:
        return pickle.dumps(PlanError(str(error)))
    return message


def _described(error: Exception) -> str:
    """Type, message and innermost frames of an unexpected exception."""
    places = [
        f"{frame.filename}:{frame.lineno} ({frame.name})"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
    ]
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" + "".join(f"\n    {place}" for place in places[-4:])
