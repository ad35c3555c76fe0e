"""Calls in forked children: results, errors, crashes, order, parallel children, interruption."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from mindspeed.errors import ConfigError, MindSpeedError, PlanError
from mindspeed.planner import isolated

STATE = [0]


def _count() -> int:
    STATE[0] += 1
    return STATE[0]


def _processes_of(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_each_call_starts_from_the_state_of_the_parent() -> None:
    assert [isolated.call(_count) for _ in range(3)] == [1, 1, 1]
    assert STATE == [0]


def test_a_large_result_and_closures_arrive() -> None:
    size = 3_000_000
    assert isolated.call(lambda n: bytes(n + size), 5) == bytes(size + 5)


def test_errors_for_the_user_arrive_as_themselves() -> None:
    def refuse() -> None:
        raise ConfigError("--flag 3: at most 2")

    with pytest.raises(ConfigError, match="--flag 3: at most 2"):
        isolated.call(refuse)


def test_an_error_that_cannot_be_pickled_keeps_its_message() -> None:
    class Local(ConfigError):
        pass

    def refuse() -> None:
        raise Local("why")

    with pytest.raises(PlanError, match="why"):
        isolated.call(refuse)


def test_other_exceptions_name_their_place() -> None:
    def fail() -> None:
        os.environ["MISSING"]

    with pytest.raises(PlanError, match=r"MISSING'\n(.*\n)*.*test_isolated.py:\d+ \(fail\)"):
        isolated.call(fail)


def test_a_crash_is_one_error_with_the_last_lines() -> None:
    def crash() -> None:
        os.write(2, b"out of memory in kernel\n")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PlanError, match=r"SIGKILL.*\n    out of memory in kernel"):
        isolated.call(crash)


def test_an_exit_is_an_error_with_its_output() -> None:
    def leave() -> None:
        print("usage: bad flag", flush=True)
        raise SystemExit(2)

    with pytest.raises(PlanError, match=r"code 2; .*\n    usage: bad flag"):
        isolated.call(leave)


def test_a_call_that_takes_too_long_is_killed() -> None:
    with pytest.raises(PlanError, match=r"not finished after 0.1 s"):
        isolated.call(time.sleep, 60, timeout=0.1)


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_order_and_failures_in_their_place(jobs: int) -> None:
    def work(index: int) -> int:
        time.sleep(0.01 * (4 - index))
        if index == 2:
            raise ConfigError("two")
        return index

    found = list(isolated.map(work, [(i,) for i in range(5)], jobs))
    assert isinstance(found[2], MindSpeedError)
    assert [x for x in found if isinstance(x, int)] == [0, 1, 3, 4]


def test_children_run_at_the_same_time() -> None:
    """Each of two waits for a byte that only the other one sends."""
    pipes = [os.pipe(), os.pipe()]

    def meet(index: int) -> bytes:
        os.write(pipes[1 - index][1], b"x")
        return os.read(pipes[index][0], 1)

    try:
        assert list(isolated.map(meet, [(0,), (1,)], jobs=2, timeout=30)) == [b"x", b"x"]
    finally:
        for end in (*pipes[0], *pipes[1]):
            os.close(end)


def test_arguments_are_drawn_when_a_child_is_free() -> None:
    drawn = []

    def arguments() -> Iterator[tuple[int]]:
        for index in range(10):
            drawn.append(index)
            yield (index,)

    found = isolated.map(abs, arguments(), jobs=1)
    assert next(found) == 0
    assert drawn == [0, 1]  # the child of 1 works while the caller has 0
    found.close()  # type: ignore[attr-defined]
    assert drawn == [0, 1]


def test_leaving_kills_the_children() -> None:
    reader, writer = os.pipe()

    def work(index: int) -> int:
        os.write(writer, os.getpid().to_bytes(8, "little"))
        if index:
            time.sleep(600)
        return index

    found = isolated.map(work, [(0,), (1,), (2,)], jobs=3)
    try:
        assert next(found) == 0
        pids = [int.from_bytes(os.read(reader, 8), "little") for _ in range(3)]
        found.close()  # type: ignore[attr-defined]
    finally:
        os.close(reader)
        os.close(writer)
    assert _processes_of(pids) == []


@pytest.mark.skipif(not os.path.exists("/proc"), reason="Linux tells a child of its parent's end")
def test_children_end_with_a_parent_that_is_killed() -> None:
    reader, writer = os.pipe()

    def work() -> None:
        os.write(writer, os.getpid().to_bytes(8, "little"))
        time.sleep(600)

    parent = os.fork()
    if parent == 0:
        isolated.call(work)
    try:
        child = int.from_bytes(os.read(reader, 8), "little")
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        end = time.monotonic() + 20
        while (running := _is_running(child)) and time.monotonic() < end:
            time.sleep(0.01)
        if running:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reader)
        os.close(writer)
    assert not running


def _is_running(pid: int) -> bool:
    """Neither ended nor a zombie that nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_count_imports_its_modules_before_it_forks(monkeypatch):
    from mindspeed.planner.count import check

    imported = []
    monkeypatch.setattr(isolated, "import_ahead", lambda: imported.append(True))
    monkeypatch.setattr(isolated, "map", lambda *_: iter([len(imported)]))
    assert list(check._count(None, [None], 1)) == [1]
