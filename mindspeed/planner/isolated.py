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

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

from mindspeed.adaptor.versions import at_least, megatron_version
from mindspeed.errors import MindSpeedError, PlanError
from mindspeed.processes import die_with_parent, no_collection

in_child = False
"""Whether this process is a child, whose inherited objects are frozen: counting them takes long."""
_FORK = multiprocessing.get_context("fork")
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
        import mindspeed.adaptor.watched_calls
        import mindspeed.optimizer.megatron
        import mindspeed.pipeline.schedule.megatron_work
        import mindspeed.planner.count.balanced_routing
        import mindspeed.planner.count.loop
        import mindspeed.te.fused_experts
        import mindspeed.te.softmax_extensions
        import mindspeed.training.initialize
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
    [result] = each(function, [args], timeout=timeout)
    return result


def each(
    function: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    jobs: int = 1,
    timeout: float | None = None,
) -> Iterator[Any]:
    """:func:`map`, but raise the error of a call that fails."""
    for result in map(function, arguments, jobs, timeout):
        if isinstance(result, MindSpeedError):
            raise result
        yield result


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
            while not exhausted and len(running) < max(1, jobs):
                if (drawn := next(waiting, None)) is None:
                    exhausted = True
                    break
                with _no_signals():  # until the child ignores them and is among those to kill
                    running[drawn[0]] = _Child.start(function, drawn[1], timeout)
            while following in done:
                yield done.pop(following)
                following += 1
            if not running:
                return
            ends = [child.end for child in running.values() if child.end is not None]
            left = max(0.0, min(ends) - time.monotonic()) if ends else None
            ready = wait([child.pipe for child in running.values()], left)
            now = time.monotonic()
            for index, child in list(running.items()):
                if child.pipe in ready or (child.end is not None and child.end <= now):
                    done[index] = running.pop(index).result(child.pipe in ready)
    finally:
        for child in running.values():
            child.kill()


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
        pipe: receives the pickled result.
        output: file with what the child prints.
        timeout: seconds until it is killed; None: never.
        end: monotonic time at which it is killed.
    """

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    output: IO[bytes]
    timeout: float | None
    end: float | None

    @classmethod
    def start(
        cls, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None
    ) -> _Child:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        reader, writer = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_run, args=(function, args, writer, output, os.getpid()))
        process.start()
        writer.close()
        end = None if timeout is None else time.monotonic() + timeout
        return cls(process, reader, output, timeout, end)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def result(self, ready: bool) -> Any:
        """The function's return value, or the error of the call; not ready: the time is over."""
        message = None
        with suppress(EOFError, OSError):  # the process died
            message = self.pipe.recv_bytes() if ready else None
        if message is None and not ready:
            self.kill()
            return self._error(f"is not finished after {self.timeout:g} s")
        self.process.join()
        self.pipe.close()
        if message is None:
            code = self.process.exitcode or 0
            return self._error(
                f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            )
        self.output.close()
        return pickle.loads(message)

    def _error(self, what: str) -> PlanError:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        self.output.close()
        text = "".join(f"\n    {line}" for line in lines)
        printed = f"; it printed last:{text}" if text else ""
        return PlanError(f"a process that counts {what}{printed}")


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    writer: Connection,
    output: IO[bytes],
    parent: int,
) -> NoReturn:
    """Run the child, which exits here, without the exit handlers of the parent."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
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
        writer.send_bytes(_message(function, args))
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
