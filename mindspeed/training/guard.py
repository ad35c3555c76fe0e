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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mindspeed.errors import MindSpeedError

_KEY = "mindspeed/first_failure"
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
    except BaseException as error:
        first = watch.tell()
        if first == rank:
            print(_describe(command, rank, error), file=sys.stderr, flush=True)
        _leave(1)
    finally:
        watch.end()


class _Watch:
    """The store key that names the rank that failed first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._over = threading.Event()
        self._store = _connect()
        if self._store is not None:
            threading.Thread(target=self._run, name="failure-watch", daemon=True).start()

    def tell(self) -> int:
        """Report a failure of this rank; returns the rank that failed first."""
        store = _connect(timeout=2)
        if store is None:
            return self._rank
        try:
            return int(store.compare_set(_KEY, "", str(self._rank)).decode())
        except (dist.DistError, RuntimeError):
            return self._rank

    def end(self) -> None:
        """The body is over; from now on the end of other ranks is no failure."""
        self._over.set()

    def _run(self) -> None:
        assert self._store is not None
        while not self._over.is_set():
            try:
                self._store.wait([_KEY], timedelta(seconds=5))
            except dist.DistStoreError:  # nobody failed in these seconds
                continue
            except (dist.DistError, RuntimeError):  # the store is gone: so is its rank
                return
            if not self._over.is_set() and self._store.get(_KEY).decode() != str(self._rank):
                _leave(1)


def _connect(timeout: float = 60) -> dist.Store | None:
    """A connection of our own: the process group's may be busy in a blocking call."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or port == "0":
        return None
    hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not hosts_store and not dist.is_initialized():
        return None
    try:
        store = dist.TCPStore(
            address, int(port), is_master=False, timeout=timedelta(seconds=timeout)
        )
    except (dist.DistError, RuntimeError):
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _describe(command: str, rank: int, error: BaseException) -> str:
    label = f"mindspeed {command} [rank {rank}]"
    if isinstance(error, MindSpeedError) and not os.environ.get("MINDSPEED_TRACEBACK"):
        return f"{label}: {error}"
    if isinstance(error, SystemExit):
        return f"{label}: ended with status {error.code}"
    if isinstance(error, RuntimeError) and any(m in str(error) for m in _MARKS_OF_A_LOST_PEER):
        reason = str(error).splitlines()[0]
        return f"{label}: lost contact with another rank, which was killed or crashed ({reason})"
    return f"{label}:\n" + "".join(traceback.format_exception(error))


def _leave(status: int) -> None:
    """End this process now; destructors of process groups would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
