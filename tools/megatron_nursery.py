"""Runs test files of Megatron-LM on N ranks, forked from a process that has imported Megatron.

One line of JSON per request on standard input, one per finished test on standard output:

    request  {"file", "world_size", "skip", "excluded", "expected_errors", "timeout", "patience"}
    answers  {"nodeid", "outcome", "error", "where", "rank", "seconds", ...} ... {"done": file}

A test passes if it passes on every rank. Ranks are started anew, without the tests already done,
when a test hangs (longer than `timeout`), when a rank dies, and when ranks disagree about a test,
because the process groups of the survivors are then out of step. A test that fails after another
one failed otherwise in the same processes is repeated alone, so that every failure counted is its
own.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mindspeed.processes import die_with_parent, free_port
from mindspeed.testing.rank_server import (
    STACK_DUMP_SIGNAL,
    exit_text,
    kill_child,
    settle_child,
    tail,
)

PYTEST_PLUGINS = ("pytest_mock", "pytest_asyncio")  # what Megatron's tests use, if installed
PRELOAD = (
    "torch._dynamo",
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.training.initialize",
    "megatron.training.training",
    "megatron.training.checkpointing",
    "pytest",
    *PYTEST_PLUGINS,
)
IMPORT_SECONDS = 300  # to import and collect a test file
OUTPUT_TAIL = 3000


@dataclass
class Rank:
    """A forked process and what it has said so far."""

    rank: int
    pid: int
    connection: Connection
    test: str | None = None
    since: float = field(default_factory=time.monotonic)
    failing: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: bool = False


class Launch:
    """One set of ranks working through one file until the end or the first disturbance."""

    def __init__(self, request: dict[str, Any], skip: set[str], only: set[str], emit: Any):
        self.request = request
        self.skip = skip
        self.only = only
        self.emit = emit
        self.size: int = request["world_size"]
        self.ranks: list[Rank] = []
        self.collected: list[str] | None = None
        self.done: set[str] = set()
        self.finished = False
        self.failed_before = False  # a test has failed unexpectedly in these processes

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="megatron-tests-") as folder:
            self.folder = Path(folder)
            try:
                self._fork(free_port())
                while not self.finished and self._step():
                    pass
            finally:
                for rank in self.ranks:
                    kill_child(rank.pid)
                    rank.connection.close()

    def _fork(self, port: int) -> None:
        for index in range(self.size):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                for other in self.ranks:
                    other.connection.close()
                ours.close()
                _be_a_rank(index, port, self, Connection(theirs.detach()))
            theirs.close()
            self.ranks.append(Rank(index, pid, Connection(ours.detach())))

    def _step(self) -> bool:
        """Handles what has arrived; returns False when these ranks must be given up."""
        by_connection: dict[Any, Rank] = {r.connection: r for r in self.ranks if not r.ended}
        for ready in wait(list(by_connection), 0.5):
            rank = by_connection[ready]
            try:
                message = pickle.loads(rank.connection.recv_bytes())
            except (EOFError, ConnectionError):
                self._died(rank)
                return False
            if not self._handle(rank, *message):
                return False
        self.finished = all(rank.ended for rank in self.ranks)
        return self.finished or not self._cut_short()

    def _handle(self, rank: Rank, kind: str, *content: Any) -> bool:
        rank.since = time.monotonic() if kind != "failing" else rank.since
        if kind == "collected":
            if self.collected is None:
                self.collected = content[0]
                for nodeid, reason in content[1]:
                    self._finish(nodeid, {"outcome": "meaningless", "error": reason})
        elif kind == "start":
            rank.test = content[0]
        elif kind == "failing":
            rank.failing[content[0]] = {**content[1], "rank": rank.rank, "at": time.monotonic()}
        elif kind == "result":
            nodeid, result = content
            rank.results[nodeid] = {**result, "rank": rank.rank}
            rank.test = None
            if all(nodeid in other.results for other in self.ranks):
                return self._merge(nodeid)
        elif kind == "end":
            rank.ended = True
        return True

    def _merge(self, nodeid: str) -> bool:
        """All ranks have finished a test; returns False if they are out of step now."""
        results = [rank.results[nodeid] for rank in self.ranks]
        failed = [result for result in results if result["outcome"] == "failed"]
        if not failed:
            passed = [result for result in results if result["outcome"] == "passed"]
            self._finish(nodeid, (passed or results)[0])
            return True
        first = min(failed, key=lambda result: self._failed_at(nodeid, result["rank"]))
        self._finish(nodeid, first)
        return len(failed) == self.size and len({result["error"] for result in failed}) == 1

    def _failed_at(self, nodeid: str, rank: int) -> float:
        return self.ranks[rank].failing.get(nodeid, {}).get("at", 0.0)

    def _cut_short(self) -> bool:
        """Gives up on a test that takes too long or that one rank has already failed."""
        now = time.monotonic()
        busy = [rank for rank in self.ranks if not rank.ended]
        failures = [
            failure
            for rank in busy
            if rank.test
            for other in self.ranks
            if (failure := other.failing.get(rank.test))
        ]
        late = [failure for failure in failures if now - failure["at"] > self.request["patience"]]
        if late:
            first = min(late, key=lambda failure: failure["at"])
            nodeid = next(n for r in self.ranks for n, f in r.failing.items() if f is first)
            self._finish(nodeid, {**first, "remark": "other ranks were still waiting"})
            return True
        if self.collected is not None and self.done >= set(self.collected):
            return self._end_overdue(busy, now)
        limit = self.request["timeout"] if self.collected is not None else IMPORT_SECONDS
        hung = [rank for rank in busy if rank.test and now - rank.since > limit]
        idle = [rank for rank in busy if not rank.test and now - rank.since > IMPORT_SECONDS]
        if hung or idle:
            self._hung((hung or idle)[0])
            return True
        return False

    def _end_overdue(self, busy: list[Rank], now: float) -> bool:
        """The last test is done; ranks that hang while they take down their groups are let go."""
        if busy and all(now - rank.since > self.request["patience"] for rank in busy):
            self.finished = True
        return False

    def _hung(self, rank: Rank) -> None:
        os.kill(rank.pid, STACK_DUMP_SIGNAL)
        time.sleep(0.5)
        stacks = tail(self.folder / f"stacks{rank.rank}", 8000)
        where = _innermost(stacks)
        result = {"outcome": "hang", "error": f"hangs in {where}", "where": where}
        self._finish(
            rank.test or f"{self.request['file']}::<import>",
            {**result, "rank": rank.rank, "traceback": stacks, "seconds": self.request["timeout"]},
        )

    def _died(self, rank: Rank) -> None:
        _, status = os.waitpid(rank.pid, 0)
        output = tail(self.folder / f"output{rank.rank}", OUTPUT_TAIL)
        if self.collected is not None and self.done >= set(self.collected):
            self.finished = True  # died while taking down; every test has its result
            return
        result = {"outcome": "crash", "error": exit_text(status)}
        if rank.test is None and (reasons := re.findall(r"^E +(.+)$", output, re.MULTILINE)):
            result = {"outcome": "failed", "error": reasons[-1]}  # pytest could not even start
        self._finish(
            rank.test or f"{self.request['file']}::<import>",
            {**result, "rank": rank.rank, "traceback": output},
        )

    def _finish(self, nodeid: str, result: dict[str, Any]) -> None:
        if nodeid in self.done:
            return
        self.done.add(nodeid)
        failed = result["outcome"] in ("failed", "hang", "crash") and not any(
            re.search(pattern, result["error"]) for pattern in self.request["expected_errors"]
        )
        result = {key: value for key, value in result.items() if key != "at"}
        self.emit(nodeid, result, failed and self.failed_before)
        self.failed_before |= failed


def _be_a_rank(index: int, port: int, launch: Launch, connection: Connection) -> None:
    """Body of a forked process: pytest over the file; never returns."""
    folder, request = launch.folder, launch.request
    settle_child(folder / f"output{index}", folder / f"stacks{index}")
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(launch.size),
        LOCAL_WORLD_SIZE=str(launch.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TMPDIR=str(folder),
    )
    tempfile.tempdir = None
    import pytest
    from megatron_plugin import RankReporter, offline, without_cuda_wheels

    def send(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    status = 0
    try:
        offline()
        without_cuda_wheels()
        _let_tests_ask_like_megatron(request["file"])
        reporter = RankReporter(send, launch.skip, launch.only, request["excluded"])
        options = ["-q", "-s", "-o", "addopts=", "-p", "no:cacheprovider", "--rootdir", os.getcwd()]
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each costs every rank its import
        options += [word for name in PYTEST_PLUGINS if name in sys.modules for word in ("-p", name)]
        base = ["--basetemp", str(folder / f"rank{index}")]
        pytest.main([request["file"], *options, *base], plugins=[reporter])
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _let_tests_ask_like_megatron(file: str) -> None:
    """The adaptor tells Megatron's modules that there is a device; its tests need that, too."""
    if "mindspeed.device" in sys.modules:
        sys.modules["mindspeed.device"].treat_as_megatron("tests", Path(file).stem)


def _innermost(stacks: str) -> str:
    """The first frame of the main thread that belongs to Megatron, its tests or this library."""
    main_thread = stacks.split("most recent call first", 1)[-1]
    if "Current thread" in stacks:
        main_thread = stacks.split("Current thread", 1)[1]
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', main_thread)
    for file, function in frames:
        if "/megatron/" in file or "/unit_tests/" in file:
            return f"{function} ({Path(file).parent.name}/{Path(file).name})"
    return f"{frames[0][1]} ({frames[0][0]})" if frames else "an unknown place"


def run_file(request: dict[str, Any], write: Any) -> None:
    """Runs every test of a file that is not in `skip`, in as many launches as it takes."""
    done = set(request["skip"])
    known_errors: set[str] = set()  # of tests that failed by themselves
    doubtful: dict[str, dict[str, Any]] = {}

    def emit(nodeid: str, result: dict[str, Any], follows_failure: bool) -> None:
        error = result.get("error", "")
        if follows_failure and result["outcome"] == "failed" and error not in known_errors:
            doubtful[nodeid] = result
            return
        known_errors.add(error)
        write({"nodeid": nodeid, **result})

    while True:
        launch = Launch(request, done, set(), emit)
        launch.run()
        progress = launch.done - done
        done |= launch.done
        if launch.finished or not progress:
            break
    for nodeid, first in doubtful.items():
        if nodeid.endswith("::<import>") or first["error"] in known_errors:
            write({"nodeid": nodeid, **first})
            continue
        alone: dict[str, Any] = {}
        Launch(
            request,
            set(),
            {nodeid},
            lambda name, result, _, alone=alone: alone.update({name: result}),
        ).run()
        final = alone.get(nodeid, first)
        known_errors.add(final.get("error", ""))
        write({"nodeid": nodeid, **final})


def main(copy: str, adaptor: str) -> None:
    """Imports the adaptor and Megatron, then serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # When this process dies, no grandchild that lives on may keep the driver waiting for answers.
    os.register_at_fork(after_in_child=answers.close)
    os.dup2(2, 1)  # whatever imports print is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets Ctrl-C, and this goes with it
    die_with_parent()
    os.chdir(copy)
    sys.path[:0] = [copy]

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    if adaptor:
        importlib.import_module(adaptor)
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except Exception as error:
            write({"note": f"cannot import {name} in advance: {error!r}"})
    location = str(sys.modules["megatron.core"].__file__)
    if not location.startswith(copy + os.sep):
        raise SystemExit(f"megatron.core was imported from {location}, not from {copy}")
    write({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        run_file(request, write)
        write({"done": request["file"]})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
