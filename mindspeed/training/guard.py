"""One rank fails, all ranks stop, and the error stays visible.

A rank that raises prints its message, tells the others through the job's key-value store and leaves
at once, without the collectives that an orderly exit would wait for. The other ranks watch that key
in a thread, because their main thread may be blocked in a collective that never ends; they leave
silently, so that the first error is the last thing on the screen. A rank that was killed tells
nobody: the others notice a broken connection and say so in one line.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mindspeed.errors import DEBUG, MindSpeedError, describe

_KEY = "mindspeed/first_failure"
_SECONDS_BETWEEN_LOOKS = 1.0
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
    watch = _Watch(rank)
    try:
        yield
    except KeyboardInterrupt:
        _leave(130)
    except SystemExit as end:
        if not end.code:
            raise
        print(_describe(command, rank, end), file=sys.stderr, flush=True)
        _leave(1)
    except BaseException as error:
        first = watch.tell()
        if first == rank:
            print(_describe(command, rank, error), file=sys.stderr, flush=True)
        _leave(1)
    finally:
        watch.end()


class _Watch:
    """The store key that names the rank that failed first, looked at once a second."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failure-watch", daemon=True)
        self._thread.start()

    def tell(self) -> int:
        """Report a failure of this rank; returns the rank that failed first."""
        self._over.set()
        try:
            return int(_connect(seconds=2).compare_set(_KEY, "", str(self._rank)).decode())
        except (dist.DistError, RuntimeError):
            return self._rank

    def end(self) -> None:
        """The body is over; from now on the end of other ranks is no failure."""
        self._over.set()
        self._thread.join(timeout=_SECONDS_BETWEEN_LOOKS)

    def _run(self) -> None:
        try:
            store = _connect(seconds=600)  # rank 0 may open the store only when it joins
            while not self._over.wait(_SECONDS_BETWEEN_LOOKS):
                if store.check([_KEY]) and not self._over.is_set():
                    _leave(1)
        except (dist.DistError, RuntimeError):  # the store is gone: so is its rank
            return


def _connect(seconds: float) -> dist.Store:
    """A connection of our own: the process group's may be busy in a blocking call."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=seconds),
    )
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _describe(command: str, rank: int, error: BaseException) -> str:
    label = f"mindspeed {command} [rank {rank}]"
    if isinstance(error, SystemExit):
        return f"{label}: ended with status {error.code}"
    ours = isinstance(error, MindSpeedError) or os.environ.get(DEBUG)
    lost = isinstance(error, RuntimeError) and any(m in str(error) for m in _MARKS_OF_A_LOST_PEER)
    if lost and not ours:
        reason = str(error).splitlines()[0]
        return f"{label}: lost contact with another rank, which was killed or crashed ({reason})"
    return f"{label}: {describe(error)}"


def _leave(status: int) -> None:
    """End this process now; destructors of process groups would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
