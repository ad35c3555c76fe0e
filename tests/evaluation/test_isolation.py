"""Hostile programs, in every isolation that this machine has: each attack fails in each of them.

The same attacks succeed without isolation, which proves that they are attacks. Nothing here may
harm a machine on which a protection is missing: forked children end by themselves, memory is
bounded, files, sockets and processes are of this test.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from functools import cache

import psutil
import pytest

from mindspeed.evaluation import code_execution, sandbox
from mindspeed.evaluation.code_execution import Isolation, ResourceLimits, run_program

NOTHING = Isolation()
LANDLOCK, SECCOMP = sandbox.landlock_version(), sandbox.libseccomp() is not None
MODES = {
    "bubblewrap": Isolation("bubblewrap", LANDLOCK, SECCOMP),
    "bubblewrap alone": Isolation("bubblewrap"),
    "namespaces": Isolation("namespaces", LANDLOCK, SECCOMP),
    "filters alone": Isolation("none", LANDLOCK, SECCOMP),
}
# Each with a file of its own (PATH); VICTIM is a process, PORT and SOCKET listen.
ATTACKS = {
    "read": "assert open(PATH).read() == 'precious'",
    "list": "assert os.listdir(os.path.dirname(PATH))",
    "write": "open(PATH, 'w').write('x')",
    "append": "open(PATH, 'a').write('x')",
    "truncate": "os.truncate(PATH, 0)",
    "create": "open(PATH + '.new', 'x')",
    "mkdir": "os.mkdir(PATH + '.folder')",
    "remove": "os.remove(PATH)",
    "rename": "os.rename(PATH, PATH + '.other')",
    "link": "os.link(PATH, PATH + '.link')",
    "through a link": "os.symlink(PATH, 'mine'); open('mine', 'w').write('x')",
    "fifo": "os.mkfifo(PATH + '.fifo')",
    "chmod": "os.chmod(PATH, 0o777)",
    "fchmod": "os.fchmod(os.open(PATH, os.O_RDONLY), 0o777)",
    "chown": "os.chown(PATH, os.getuid(), os.getgid())",
    "utime": "os.utime(PATH, (1, 1))",
    "setxattr": "os.setxattr(PATH, 'user.x', b'x')",
    "flags": "import fcntl; fcntl.ioctl(os.open(PATH, os.O_RDONLY), 0x80086601, bytes(8))",
    "command lines": "assert SECRET.encode() in b''.join(map(quietly, glob('/proc/*/cmdline')))",
    "environments": "assert b'HIDDEN' in b''.join(map(quietly, glob('/proc/*/environ')))",
    "limits of others": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE)",
    "priority of others": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "affinity of others": "os.sched_setaffinity(VICTIM, os.sched_getaffinity(VICTIM))",
    "signal": "os.kill(VICTIM, 0); os.kill(VICTIM, signal.SIGCONT)",
    "signal by a file": "a, _ = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETOWN, VICTIM)",
    "tcp": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "udp": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "unix socket": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "datagram": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', DATAGRAMS)",
    "shared memory": "open('/dev/shm/' + SECRET, 'x'); os.remove('/dev/shm/' + SECRET)",
    "another program": "assert os.spawnv(os.P_WAIT, '/bin/sh', ['sh', '-c', 'exit 3']) == 3",
}
HEAD = """
import fcntl, os, resource, signal, socket
from glob import glob
def quietly(path):
    try:
        return open(path, 'rb').read()
    except OSError:
        return b''
"""
NOT_EVERYWHERE = {"flags", "setxattr", "environments"}  # by file system, and rights over processes


class Target:
    """A directory, sockets and a process to attack."""

    def __init__(self, folder):
        self.folder = folder
        self.secret = "hidden-" + os.urandom(8).hex()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.unix, self.datagrams = (
            self._unix(name, kind)
            for name, kind in (("s", socket.SOCK_STREAM), ("d", socket.SOCK_DGRAM))
        )
        self.victim = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)", self.secret],
            env={"HIDDEN": self.secret},
        )

    def _unix(self, name, kind):
        here = socket.socket(socket.AF_UNIX, kind)
        here.bind(str(self.folder / name))
        if kind == socket.SOCK_STREAM:
            here.listen(64)
        return here

    def close(self):
        self.victim.kill()
        self.victim.wait()
        for one in (self.listener, self.unix, self.datagrams):
            one.close()

    def program(self, folder):
        """All attacks one after the other; it fails with the numbers of those that succeeded."""
        values = {
            "VICTIM": self.victim.pid,
            "PORT": self.listener.getsockname()[1],
            "SOCKET": str(self.folder / "s"),
            "DATAGRAMS": str(self.folder / "d"),
            "SECRET": self.secret,
        }
        lines = [HEAD, *(f"{name} = {value!r}" for name, value in values.items()), "done = []"]
        for number, attack in enumerate(ATTACKS.values()):
            path = folder / str(number)
            path.mkdir()
            (path / "file").write_text("precious")
            lines.append(f"PATH = {str(path / 'file')!r}")
            lines.append(f"try:\n    {attack}\n    done.append({number})\nexcept BaseException: 0")
        return "\n".join([*lines, "raise SystemExit(','.join(map(str, done)) or 'none')"])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = Target(tmp_path_factory.mktemp("target"))
    yield target
    target.close()


@pytest.fixture(scope="module")
def succeeded(target, tmp_path_factory):
    """Names of the attacks that succeed in an isolation, and where their files are."""

    @cache
    def run(around):
        folder = tmp_path_factory.mktemp("files")
        verdict = run_program(target.program(folder), ResourceLimits(seconds=30), around)
        assert not verdict.passed
        numbers = [int(part) for part in verdict.reason.replace("none", "").split(",") if part]
        return {list(ATTACKS)[number] for number in numbers}, folder

    return run


PLAIN = {
    "bubblewrap": ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--unshare-all", "true"],
    "namespaces": ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true"],
}


@cache
def works(wrapper):
    """Whether the machine lets the plain command do it; ours must then do it, too."""
    command = PLAIN[wrapper]
    return bool(shutil.which(command[0])) and subprocess.run(command, check=False).returncode == 0


def needed(mode):
    """The isolation of a mode; skips where the machine does not have it."""
    around = MODES[mode]
    kernel = bool(LANDLOCK) and SECCOMP  # what kernel and library offer must work
    there = kernel if mode == "filters alone" else works(around.wrapper)
    if not there:
        pytest.skip(f"this machine has no {mode}")
    return around


def test_without_isolation_the_attacks_succeed(succeeded):
    found, _ = succeeded(NOTHING)
    assert set(ATTACKS) - found <= NOT_EVERYWHERE


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_attack_fails(mode, attack, succeeded, target):
    found, folder = succeeded(needed(mode))
    if (mode, attack) != ("bubblewrap alone", "udp"):  # to a loopback interface of its own
        assert attack not in found
    path = folder / str(list(ATTACKS).index(attack))
    assert os.listdir(path) == ["file"] and (path / "file").read_text() == "precious"
    status = (path / "file").stat()
    assert status.st_mtime > 1 and status.st_mode & 0o777 != 0o777
    assert target.victim.poll() is None


@pytest.mark.parametrize("mode", MODES)
def test_ordinary_programs_run_in_every_isolation_without_our_environment(mode, monkeypatch):
    around = needed(mode)
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    program = (
        "import os, sys, tempfile, random, datetime, decimal, threading, socket, asyncio\n"
        "assert 'SECRET_TOKEN' not in os.environ and len(sys.argv) == 1\n"
        "open('mine', 'w').write('x'); assert open('mine').read() == 'x'\n"
        "os.mkdir('d'); os.rename('mine', 'd/x'); assert os.listdir('d') == ['x']\n"
        "with tempfile.TemporaryDirectory(dir='.') as folder: open(folder + '/y', 'w').close()\n"
        "threads = [threading.Thread(target=random.random) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert asyncio.run(asyncio.sleep(0, 3)) == 3\n"
        "print(datetime.datetime.now(), decimal.Decimal(1) / 3)\n"
    )
    assert run_program(program, ResourceLimits(), around) == code_execution.ProgramResult(
        True, "passed"
    )
    assert "ModuleNotFoundError" in run_program("import numpy", ResourceLimits(), around).reason


BOMB = (
    "import os, time\n"
    "for _ in range(40):\n"
    "    if os.fork() == 0:\n        time.sleep(30)\n        os._exit(0)\n"
    "time.sleep(20)\n"
)
LEAVING = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n        time.sleep(30)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)
# Three children that touch 60 MiB each, with a limit of 128 MiB.
MEMORY = (
    "import os, time\n"
    "for _ in range(3):\n"
    "    if os.fork() == 0:\n        x = b'x' * (60 << 20)\n        time.sleep(30)\n"
    "time.sleep(20)\n"
)
FILES = "import time\nfor n in range(2000): open(str(n), 'w').close()\ntime.sleep(20)"
DISK = "import time\nfor n in range(90): open(str(n), 'w').write('x' * (1 << 20))\ntime.sleep(20)"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("mode", [*MODES, "nothing"])
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (BOMB, ("started more than 16", "BlockingIOError", "PermissionError")),
        (MEMORY, ("used more than 128 MiB", "PermissionError", "BlockingIOError")),
        ("x = bytearray(4 << 30)", ("MemoryError",)),
        (FILES, ("wrote more than 64 MiB or 1000 files",)),
        (DISK, ("wrote more than 64 MiB or 1000 files",)),
    ],
    ids=["processes", "memory of all", "memory of one", "files", "disk"],
)
def test_limits_hold_for_all_processes_together(mode, program, said):
    around = NOTHING if mode == "nothing" else needed(mode)
    before = set(psutil.pids())
    limits = ResourceLimits(seconds=10, bytes=128 << 20)
    verdict = run_program(program, limits, around)
    assert not verdict.passed and verdict.reason.startswith(said)
    _assert_gone_soon(before)


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_leaves_the_session_dies_with_the_program(mode):
    before = set(psutil.pids())
    run_program(LEAVING, ResourceLimits(seconds=3), needed(mode))
    _assert_gone_soon(before)


def _assert_gone_soon(before):
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


def test_missing_protection_is_reported_and_recorded(monkeypatch):
    assert MODES["bubblewrap"].gaps() == () or not SECCOMP
    monkeypatch.setattr(code_execution, "best_isolation", lambda: NOTHING)
    with pytest.warns(UserWarning, match="read every file that you .* command lines, use the netw"):
        code_execution.warn_about_gaps()
    assert code_execution.isolation_record()["isolation"] == "resource limits"
    assert "outlive its test" in code_execution.isolation_record()["not_prevented"]
    monkeypatch.setattr(code_execution, "best_isolation", lambda: Isolation("namespaces", 7, True))
    assert code_execution.isolation_record() == {
        "isolation": "namespaces, Landlock 7, seccomp, resource limits",
        "not_prevented": ["find out whether a file exists"],
    }


def test_the_strongest_working_isolation_is_chosen(monkeypatch):
    assert code_execution.best_isolation() == next(code_execution.available_isolations())
    monkeypatch.setattr(code_execution.shutil, "which", lambda name: None)
    assert next(code_execution.available_isolations()).wrapper == "none"
    monkeypatch.setattr(code_execution, "_COMMANDS", {"bubblewrap": "", "none": ""})
    monkeypatch.setattr(code_execution, "_bubblewrap", lambda *unused: ["false"])
    assert next(code_execution.available_isolations()).wrapper == "none"
