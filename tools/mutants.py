"""Break the code on purpose, one line at a time, and see that a test notices.

    python tools/mutants.py                                # all, about as long as a round of tests
    python tools/mutants.py --only attention --workers 4   # those whose file or text says so
    python tools/mutants.py --list

``mutants.toml`` holds the mutants: a file, a text that stands in it exactly once, what replaces it,
and the tests that must fail then. Each is applied in a copy of the repository, never in the working
tree, and its tests run in a process of their own with a time limit. A mutant that no test kills
is a hole in the tests, or it changes nothing that can be seen; then ``equivalent`` says why.

Status 1: fewer than 97 % are killed, a survivor is not explained, or tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
LEAST = 0.97
# What the processes of the tests have imported already; nothing of ours, and not Megatron, whose
# order of imports is a matter of tests.
_PRELOAD = ["torch", "numpy", "yaml", "psutil", "pytest", "hypothesis", "_pytest.assertion.rewrite"]
_NOT_COPIED = (".git", ".venv*", "__pycache__", ".*_cache", "*.egg-info", "site", "build")
# pytest's statuses where a file of tests cannot be imported, or a test of that name is not there;
# without a mutant it was.
_NOT_THERE = (2, 4)


@dataclass(frozen=True)
class Mutant:
    """One change, and the tests that must notice it.

    Attributes:
        file: relative to the repository.
        old: a text that stands in it exactly once.
        new: what replaces it.
        tests: ``tests/room/test_file.py::test_name``.
        equivalent: why no test can notice it, for a survivor.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return Path(parts[1]).stem

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {before[:60]!r} -> {after[:60]!r}"


@dataclass(frozen=True)
class Result:
    """What became of a run of tests.

    Attributes:
        fate: ``killed``, ``survived``, or ``error``: the tests could not be run.
        seconds: it took.
        detail: the first test that failed, or what went wrong.
    """

    fate: str
    seconds: float
    detail: str


def load(path: Path = TABLE) -> list[Mutant]:
    """The mutants of a table."""
    entries = tomllib.loads(path.read_text("utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with a table: texts that are not there once, tests that are not there."""
    found = []
    for mutant, count in Counter(mutants).items():
        if count > 1:
            found.append(f"{mutant}: stands there {count} times")
        source = (root / mutant.file).read_text("utf-8")
        if source.count(mutant.old) != 1:
            found.append(f"{mutant}: the text stands in the file {source.count(mutant.old)} times")
        elif mutant.old.split() == mutant.new.split():
            found.append(f"{mutant}: the mutant is the same program")
        elif (fault := _no_python(source.replace(mutant.old, mutant.new))) is not None:
            found.append(f"{mutant}: {fault}")
        if not mutant.tests:
            found.append(f"{mutant}: it names no test")
        found += [f"{mutant}: there is no {test}" for test in mutant.tests if not _is(test, root)]
    return found


def _no_python(source: str) -> str | None:
    try:
        ast.parse(source)
    except SyntaxError as error:
        return f"the mutant is no Python: {error}"
    return None


def _is(test: str, root: Path) -> bool:
    file, *names = test.split("::")
    if not names or not (root / file).is_file():
        return False
    source = (root / file).read_text("utf-8")
    kinds = ["class"] * (len(names) - 1) + ["def"]
    return all(
        re.search(rf"^\s*(async )?{kind} {re.escape(name.split('[')[0])}\b", source, re.MULTILINE)
        for kind, name in zip(kinds, names, strict=True)
    )


@contextmanager
def copy_of(root: Path = ROOT) -> Iterator[Path]:
    """A copy of the repository that may be broken."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        target = Path(folder) / "repository"
        shutil.copytree(root, target, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        yield target


@contextmanager
def applied(mutant: Mutant | None, root: Path) -> Iterator[None]:
    """The copy ``root`` with a mutant in it."""
    if mutant is None:
        yield
        return
    path = root / mutant.file
    source, times = path.read_text("utf-8"), (path.stat().st_atime, path.stat().st_mtime)
    path.write_text(source.replace(mutant.old, mutant.new), "utf-8")
    os.utime(path, (times[0], times[1] + 10))  # the compiled file next to it must not be taken
    try:
        yield
    finally:
        path.write_text(source, "utf-8")
        os.utime(path, times)


def run(tests: Sequence[str], root: Path, limit: float, compiled: bool = False) -> Result:
    """Run tests in the copy ``root``; ``killed`` where one of them fails.

    Args:
        tests: what to run.
        root: of the copy.
        limit: seconds.
        compiled: leave compiled files behind, for later runs; not with a mutant.
    """
    begin = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="mutants-log-") as folder:
        log = Path(folder) / "outcomes.json"
        process = context.Process(target=_pytest, args=(list(tests), str(root), str(log), compiled))
        process.start()
        process.join(limit)
        late = process.is_alive()
        _kill_group(process.pid)
        process.join()
        found = json.loads(log.read_text()) if log.exists() else {"outcomes": {}, "status": None}
    seconds = time.monotonic() - begin
    outcomes, status = found["outcomes"], found["status"]
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    if late:
        return Result("killed", seconds, f"no end within {limit:g} seconds")
    if failed:
        return Result("killed", seconds, failed[0])
    if status is None and (process.exitcode or 0) < 0:
        return Result("killed", seconds, f"ended by signal {-(process.exitcode or 0)}")
    if status in _NOT_THERE:
        return Result("killed", seconds, "the tests cannot be imported")
    if status != 0:
        return Result("error", seconds, f"pytest ended with status {status}")
    missing = [test for test in tests if not _passed(test, outcomes)]
    if missing:
        return Result("error", seconds, f"skipped on this machine: {missing[0]}")
    return Result("survived", seconds, "")


def _passed(test: str, outcomes: dict[str, str]) -> bool:
    names = (test, f"{test}[", f"{test}::")
    return any(
        outcome == "passed" and (name == test or name.startswith(names[1:]))
        for name, outcome in outcomes.items()
    )


def _pytest(tests: list[str], root: str, log: str, compiled: bool) -> None:
    """In a fresh process: nothing of ours is imported, and nothing is read from other copies."""
    os.setsid()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(root)
    os.environ.update(PYTHONPATH=root, PYTHONDONTWRITEBYTECODE="" if compiled else "1")
    sys.dont_write_bytecode = not compiled
    sys.path.insert(0, root)
    import pytest

    plugin = _Outcomes(Path(log))
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    plugin.write(int(status))
    os._exit(0)


class _Outcomes:
    """A plugin of pytest that notes what became of each test."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._found: dict[str, str] = {}

    def write(self, status: int | None = None) -> None:
        """What is known so far; ``status`` is pytest's own, at the end."""
        self._log.write_text(json.dumps({"outcomes": self._found, "status": status}))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest after set-up, call and tear-down of a test."""
        if report.when == "call" or report.outcome != "passed":
            self._found[report.nodeid] = report.outcome
            self.write()


def _kill_group(pid: int | None) -> None:
    """A test's process, and what it has started."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def run_all(
    mutants: Sequence[Mutant],
    workers: int,
    limit: float,
    say: Callable[[str], object] = print,
    root: Path = ROOT,
) -> list[Result]:
    """Run every mutant; one whose tests do not pass without it is an error."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    with ExitStack() as stack:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(workers):
            copies.put(stack.enter_context(copy_of(root)))
        pool = stack.enter_context(ThreadPoolExecutor(workers))

        def one(mutant: Mutant | None, tests: Sequence[str]) -> Result:
            copy = copies.get()
            try:
                with applied(mutant, copy):
                    return run(tests, copy, limit, compiled=mutant is None)
            finally:
                copies.put(copy)

        sound = _without_a_mutant(mutants, one, pool, say)
        futures = {
            pool.submit(one, mutant, mutant.tests): mutant
            for mutant in mutants
            if sound.issuperset(mutant.tests)
        }
        results: dict[Mutant, Result] = {}
        for number, future in enumerate(as_completed(futures), 1):
            mutant, result = futures[future], future.result()
            results[mutant] = result
            line = f"{number:4}/{len(futures)} {result.fate:8} {result.seconds:6.1f}s {mutant}"
            say(line if result.fate == "killed" else f"{line} {result.detail}")
    failing = Result("error", 0.0, "its tests do not pass without it")
    return [results.get(mutant, failing) for mutant in mutants]


def _without_a_mutant(
    mutants: Sequence[Mutant],
    one: Callable[[Mutant | None, Sequence[str]], Result],
    pool: ThreadPoolExecutor,
    say: Callable[[str], object],
) -> set[str]:
    """The tests that pass without a mutant: those of a file together, one by one if need be."""
    files: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        files.setdefault(test.split("::")[0], set()).add(test)
    groups = [sorted(tests) for tests in files.values()]
    sound: set[str] = set()
    for tests, result in zip(groups, pool.map(partial(one, None), groups), strict=True):
        if result.fate == "survived":
            sound.update(tests)
        else:
            say(f"without a mutant: {result.fate}: {result.detail}")
            sound.update(test for test in tests if one(None, [test]).fate == "survived")
    return sound


def report(mutants: Sequence[Mutant], results: Sequence[Result]) -> tuple[str, bool]:
    """A table by room with the survivors below it, and whether that is enough."""
    fates: dict[str, Counter[str]] = {}
    survivors, good = [], True
    for mutant, result in zip(mutants, results, strict=True):
        fates.setdefault(mutant.room, Counter())[result.fate] += 1
        if result.fate != "killed":
            why = mutant.equivalent if result.fate == "survived" else result.detail
            survivors.append(f"{result.fate:8} {mutant}\n         {why or 'NOT EXPLAINED'}")
            good = good and bool(mutant.equivalent) and result.fate == "survived"
    lines = [f"{'room':14} mutants  killed survived   error"]
    for room, fate in sorted(fates.items()):
        lines.append(f"{room:14} {fate.total():7} " + _cells(fate))
    total = sum(fates.values(), Counter())
    share = total["killed"] / max(1, total.total())
    lines.append(f"{'all':14} {total.total():7} {_cells(total)}   {share:.1%} killed")
    return "\n".join([*lines, *survivors]), good and share >= LEAST


def _cells(fate: Counter[str]) -> str:
    return " ".join(f"{fate[name]:7}" for name in ("killed", "survived", "error"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="regular expression for file or texts")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a mutant (240)")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    args = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in load()
        if args.only is None or re.search(args.only, f"{mutant.file} {mutant.old} {mutant.new}")
    ]
    if wrong := faults(chosen):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if args.list or not chosen:
        print("\n".join(map(str, chosen)) or f"no mutant says {args.only}")
        return 0 if chosen else 1
    results = run_all(chosen, args.workers, args.timeout, lambda line: print(line, flush=True))
    text, good = report(chosen, results)
    print(f"\n{text}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
