"""One rank fails, all ranks stop, and the error stays visible.

A rank that raises prints its message, tells the others through the job's key-value store and leaves
at once, without the collectives that an orderly exit would wait for. The other ranks watch that key
in a thread, because their main thread may be blocked in a collective that never ends; they leave
silently, so that the first error is the last thing on the screen. A rank that was killed tells
no one: the others notice a broken connection and say so in one line. A rank that is stopped or
hangs breaks no connection: the same thread increments a heartbeat in the store, and when a
collective times out, ranks without heartbeat are named. Ranks that wait for the message of a
pipeline stage note which one, so that whoever is first tells what the rank at the end of these
waits did not send.

torchrun prints its own report at the end. It quotes the file that ``TORCHELASTIC_ERROR_FILE``
names, to which each rank writes the same line.

A rank ends when its launcher is gone, also after kill -9 of the launcher. On Linux the kernel ends
the rank (``PR_SET_PDEATHSIG``); elsewhere, and where the kernel was asked too late, the thread
notices that the parent has changed. This holds for launchers that run as long as the job: ours, and
torchrun. A shell that starts ranks in the background may end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from mindspeed.errors import DEBUG, MindSpeedError, NoAnswer, describe
from mindspeed.files import atomic_write_text
from mindspeed.job_store import connect, of_this_attempt
from mindspeed.processes import die_with_parent

_KEY = "mindspeed/first_failure"
_POLL_SECONDS = 1.0
_HEARTBEAT = "mindspeed/beat/{}"
_WAIT = "mindspeed/wait/{}"
_POLLS_PER_HEARTBEAT = 2
_SECONDS_TO_SEE_HEARTBEATS = 6.0
_MARKS_OF_A_TIMEOUT = ("timed out", "timeout", "timed_out")
_MARKS_OF_A_LOST_PEER = ("gloo", "Connection", "NCCL", "HCCL", "Socket", "recv", "store")


@contextmanager
def stop_together(command: str) -> Iterator[None]:
    """Run the body of a rank; on an exception print it and end the whole job.

    Does nothing special outside a job of several ranks. A process that fails inside one does not
    return from here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    rank = int(os.environ["RANK"])
    launcher = launcher_of(os.environ)
    if launcher is not None:
        end_with(launcher)
    watch = _Watch(rank, launcher)
    try:
        yield
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as end:
        if not end.code:
            raise
        _say(_describe(command, rank, end))
        _leave(1)
    except BaseException as error:
        others = _look(rank, error) if _is_timeout(error) else _NOT_LOOKED
        first = watch.report()
        if first == rank:
            _say(_describe(command, rank, error, others))
        else:
            _note_for_torchrun(f"rank {first} failed first", later=True)
        _leave(1)
    finally:
        watch.end()


class _Watch:
    """Polls once a second the store key with the rank that failed first."""

    def __init__(self, rank: int, launcher: int | None) -> None:
        self._rank = rank
        self._launcher = launcher
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failure-watch", daemon=True)
        self._thread.start()

    def report(self) -> int:
        """Report a failure of this rank; returns the rank that failed first."""
        self._over.set()
        try:
            return int(connect(seconds=2).compare_set(_KEY, "", str(self._rank)).decode())
        except (dist.DistError, RuntimeError):
            return self._rank

    def end(self) -> None:
        """The body has ended: other ranks that end now have not failed."""
        self._over.set()
        self._thread.join(timeout=_POLL_SECONDS)

    def _run(self) -> None:
        try:
            store = connect(seconds=600)  # rank 0 may open the store only when it joins
            polls = 0
            while not self._over.wait(_POLL_SECONDS):
                if self._launcher is not None and is_gone(self._launcher):
                    _leave(1)
                if polls % _POLLS_PER_HEARTBEAT == 0:
                    store.add(_HEARTBEAT.format(self._rank), 1)
                polls += 1
                if store.check([_KEY]) and not self._over.is_set():
                    first = store.get(_KEY).decode()
                    _note_for_torchrun(f"rank {first} failed first", later=True)
                    _leave(1)
        except (dist.DistError, RuntimeError):  # the store is gone: so is its rank
            return


def report_failure(store: dist.Store, rank: int) -> None:
    """Report a failed ``rank`` that could not report itself, so that all ranks leave.

    Args:
        store: The job's store, in the process of the launcher.
        rank: The one that failed first.
    """
    of_this_attempt(store).compare_set(_KEY, "", str(rank))


@dataclass(frozen=True)
class _Others:
    """What a rank whose wait timed out finds out about all.

    Attributes:
        silent: ranks without heartbeat: stopped, or on a machine that hangs.
        waits: of ranks that waited for a pipeline stage until their time was up.
    """

    silent: Sequence[int] = ()
    waits: Sequence[NoAnswer] = ()


_NOT_LOOKED = _Others()


def _look(rank: int, error: BaseException) -> _Others:
    """Look at the others for some seconds, in which waits of more ranks time out."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    try:
        store = connect(seconds=5)
        if isinstance(error, NoAnswer):
            store.set(_WAIT.format(rank), json.dumps([str(error), error.rank, error.awaited]))
        before = [store.add(_HEARTBEAT.format(other), 0) for other in ranks]
        time.sleep(_SECONDS_TO_SEE_HEARTBEATS)
        after = [store.add(_HEARTBEAT.format(other), 0) for other in ranks]
        noted = [key for key in map(_WAIT.format, ranks) if store.check([key])]
        waits = [NoAnswer(*json.loads(store.get(key))) for key in noted]
    except (dist.DistError, RuntimeError):
        return _NOT_LOOKED
    return _Others([r for r in ranks if after[r] == before[r] and r != rank], waits)


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(mark in text for mark in _MARKS_OF_A_TIMEOUT)


def _describe(command: str, rank: int, error: BaseException, others: _Others = _NOT_LOOKED) -> str:
    label = f"mindspeed {command} [rank {rank}]"
    if isinstance(error, SystemExit):
        return f"{label}: ended with status {error.code}"
    ours = isinstance(error, MindSpeedError) or os.environ.get(DEBUG)
    lost = isinstance(error, RuntimeError) and any(m in str(error) for m in _MARKS_OF_A_LOST_PEER)
    reason = (str(error).splitlines() or [""])[0]
    if others.waits:
        wait = _cause(error, others)
        return f"{label}: {describe(wait)}; {_state(wait.awaited, others)}"
    if isinstance(error, NoAnswer) and not _is_timeout(error):
        return f"{label}: {describe(error)}; rank {error.awaited} was killed or crashed"
    if _is_timeout(error) and not ours:
        return f"{label}: {_unanswered(others.silent)} ({reason})"
    if lost and not ours:
        return f"{label}: lost contact with another rank, which was killed or crashed ({reason})"
    return f"{label}: {describe(error)}"


def _cause(error: BaseException, others: _Others) -> NoAnswer:
    """The wait for a rank that waits for none itself, of those for pipeline stages."""
    waiting = {wait.rank for wait in others.waits}
    ends = [wait for wait in others.waits if wait.awaited not in waiting]
    for wait in ends:
        if wait.awaited in others.silent:
            return wait
    return ends[0] if ends else error if isinstance(error, NoAnswer) else others.waits[0]


def _state(rank: int, others: _Others) -> str:
    if others.silent:
        return _unanswered(others.silent)
    if any(wait.rank == rank for wait in others.waits):
        return "all ranks are alive: they wait for each other"
    return f"rank {rank} is alive and sends nothing"


def _unanswered(silent: Sequence[int]) -> str:
    if not silent:
        return "a collective timed out, though all ranks are alive: they wait for different ones"
    names = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
    one = len(silent) == 1
    return (
        f"rank{'' if one else 's'} {names} {'does' if one else 'do'} not answer: the process is "
        "stopped (SIGSTOP, a debugger) or its machine hangs"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    _note_for_torchrun(line)


def _note_for_torchrun(line: str, *, later: bool = False) -> None:
    """Write a message to the file that torchrun's report quotes.

    The report calls the failure with the smallest time, in whole seconds, the root cause: that of a
    rank that leaves because of another one must be ``later``.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    more = {"py_callstack": line, "timestamp": str(int(time.time()) + later)}
    with contextlib.suppress(OSError):
        atomic_write_text(path, json.dumps({"message": {"message": line, "extraInfo": more}}))


def _leave(status: int) -> None:
    """End this process now; destructors of process groups would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


LAUNCHER = "MINDSPEED_LAUNCHER_PID"


def launcher_of(environment: Mapping[str, str]) -> int | None:
    """Process id of the launcher of this rank; None if none runs as long as the job."""
    given = environment.get(LAUNCHER, "")
    if given.isdigit() and (int(given) == os.getppid() or not _exists(int(given))):
        return int(given)  # of a parent, not of an ancestor: a rank may start programs
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


def end_with(launcher: int) -> None:
    """Let the kernel end this process when ``launcher``, its parent, ends."""
    die_with_parent()
    if is_gone(launcher):
        os._exit(1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_gone(launcher: int) -> bool:
    """Whether ``launcher`` is no longer the parent of this process."""
    return os.getppid() != launcher
