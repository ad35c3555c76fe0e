"""Hostile programs fail, quickly, and leave nothing behind.

Nothing here may harm a machine on which a protection is missing: the fork bomb has a fixed number
of children that end by themselves, memory is only reserved, files are of this test.
"""

from __future__ import annotations

import time

import psutil
import pytest

from mindspeed.errors import ConfigError
from mindspeed.evaluation import execute, limited
from mindspeed.evaluation.execute import Limits, check, check_all

SHORT = Limits(seconds=3)
needs_namespaces = pytest.mark.skipif(
    not execute._namespaces(), reason="unshare may not make namespaces here"
)
needs_landlock = pytest.mark.skipif(
    not limited.landlock_version(), reason="this kernel has no Landlock"
)


def test_a_right_program_passes_and_a_wrong_one_says_why():
    right, wrong = check_all(["assert 1 + 1 == 2", "assert 1 + 1 == 3, 'no'"])
    assert right == execute.Verdict(True, "passed")
    assert wrong == execute.Verdict(False, "AssertionError: no")


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os, sys; print('0' * 32); sys.stdout.flush(); os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.execv('/bin/true', ['true'])",
    ],
)
def test_ending_before_the_tests_is_no_pass(program):
    assert not check(f"{program}\nassert False", SHORT).passed


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_ended(program):
    limits = Limits(seconds=1)
    assert check(program, limits).reason == "did not end within 1 seconds"


def test_four_gigabytes_are_refused():
    verdict = check("x = bytearray(4 << 30)", SHORT)
    assert verdict == execute.Verdict(False, "MemoryError")


def test_many_processes_are_ended_all_of_them():
    """40 children that sleep for half a minute; root's own limit of processes does not count."""
    bomb = (
        "import os, time\n"
        "for _ in range(40):\n"
        "    if os.fork() == 0:\n        time.sleep(30)\n        os._exit(0)\n"
        "time.sleep(20)\n"
    )
    before = set(psutil.pids())
    verdict = check(bomb, Limits(seconds=10))
    assert not verdict.passed
    assert verdict.reason.startswith(("started more than 16", "BlockingIOError"))
    _wait_until_gone(before)


@needs_namespaces
def test_a_process_that_leaves_the_session_dies_with_the_program():
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n        time.sleep(30)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    before = set(psutil.pids())
    check(program, SHORT)
    _wait_until_gone(before)


def _wait_until_gone(before):
    """No Python child of a program is left; other processes of the machine come and go."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        left = [pid for pid in set(psutil.pids()) - before if _runs_a_program(pid)]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {left}")


def _runs_a_program(pid):
    try:
        process = psutil.Process(pid)
        return "program.py" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@needs_landlock
@pytest.mark.parametrize(
    "deed",
    ["open({!r}, 'w').write('x')", "import os; os.remove({!r})", "import os; os.truncate({!r}, 0)"],
)
def test_files_outside_cannot_be_changed(tmp_path, deed):
    file = tmp_path / "precious.txt"
    file.write_text("precious")
    verdict = check(deed.format(str(file)), SHORT)
    assert not verdict.passed and "PermissionError" in verdict.reason
    assert file.read_text() == "precious"


@needs_landlock
def test_files_cannot_be_made_outside_but_inside(tmp_path):
    assert not check(f"open({str(tmp_path / 'new')!r}, 'w')", SHORT).passed
    assert list(tmp_path.iterdir()) == []
    assert check("open('mine', 'w').write('x'); assert open('mine').read() == 'x'", SHORT).passed


@needs_namespaces
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_there_is_no_network(kind):
    program = (
        "import socket\n"
        f"s = socket.socket(socket.AF_INET, socket.{kind})\n"
        "s.settimeout(2)\n"
        "s.connect(('192.0.2.1', 53))\n"
    )
    verdict = check(program, SHORT)
    assert not verdict.passed
    assert "Network is unreachable" in verdict.reason or "PermissionError" in verdict.reason


def test_a_flood_of_output_is_stopped():
    started = check("while True: print('x' * 100_000)", Limits(seconds=5))
    assert not started.passed and "did not end" not in started.reason
    assert len(started.reason) <= 200


def test_nothing_of_our_environment_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    program = "import os, sys\nassert 'SECRET_TOKEN' not in os.environ\nassert len(sys.argv) == 1"
    assert check(program, SHORT).passed
    assert not check("import numpy", SHORT).passed  # no site-packages either


def test_what_a_machine_cannot_prevent_is_said(monkeypatch):
    monkeypatch.setattr(execute, "_namespaces", lambda: ())
    monkeypatch.setattr(limited, "landlock_version", lambda: 0)
    with pytest.warns(UserWarning, match="use the network .* change every file that you may"):
        execute.warn_about_gaps()


def test_without_namespaces_programs_are_still_limited(monkeypatch):
    monkeypatch.setattr(execute, "_namespaces", lambda: ())
    assert check("assert True", SHORT).passed
    assert not check("import time; time.sleep(60)", Limits(seconds=1)).passed
    assert not check("x = bytearray(4 << 30)", SHORT).passed


def test_consent_is_asked_for():
    with pytest.raises(ConfigError, match="human_eval runs programs that the model writes"):
        execute.require_consent(False, "human_eval")
    execute.require_consent(True, "human_eval")
