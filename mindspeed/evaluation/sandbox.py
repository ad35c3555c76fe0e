"""Runs in the child process: drops its permissions, then executes a generated program.

    python -I -S sandbox.py '{"landlock": true, "seccomp": true, "seconds": 10, ...}' program.py

Only the standard library, because ``-I -S`` leaves nothing else to import. None of this needs
privileges, none can be reverted, and all of it applies to root as well:

* Landlock [1] (Linux 5.13 and later): files are readable only below the interpreter's and the
  system's libraries and writable only below the working directory; no TCP (6.7), no signals to
  other processes (6.12).
* seccomp, through libseccomp [2]: only the system calls that a Python program needs. A single
  process with threads, so that the address-space limit bounds all its memory; no changes of modes,
  owners, times and extended attributes, which Landlock does not cover; no sockets but pairs; no
  signals.
* resource limits.

[1] https://docs.kernel.org/userspace-api/landlock.html
[2] https://github.com/seccomp/libseccomp
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import stat
import sys
from collections.abc import Iterator, Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ABI_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVILEGES = 38

_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
# remove and make directories, files, devices, sockets, pipes and links
_CHANGE_TREE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE
_BIND_AND_CONNECT = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
SCOPES_SINCE = 6
_RULESET_SIZES = {4: 16, SCOPES_SINCE: 24}  # of the structure since a Landlock version; 8 before

_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7
_THREAD = 0x00010000
_NAMESPACES = 0x7E020080

_CALLS = """
access arch_prctl alarm brk capget chdir clock_getres clock_gettime clock_nanosleep close
close_range copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait
epoll_pwait2 epoll_wait eventfd eventfd2 execve exit exit_group faccessat faccessat2 fadvise64
fallocate fchdir fdatasync flock fstat fstatfs fsync ftruncate futex futex_waitv getcpu getcwd
getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
gettid gettimeofday getuid get_robust_list lgetxattr link linkat listxattr llistxattr lseek lstat
madvise membarrier mincore mkdir mkdirat mmap mprotect mremap msync munmap nanosleep newfstatat open
openat openat2 pause pipe pipe2 poll ppoll prctl pread64 preadv preadv2 pselect6 pwrite64 pwritev
pwritev2 read readahead readlink readlinkat readv recvfrom rename renameat renameat2 restart_syscall
rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait
sched_getaffinity sched_getparam sched_get_priority_max sched_get_priority_min sched_getscheduler
sched_yield select sendfile set_robust_list set_tid_address setitimer setrlimit shutdown sigaltstack
socketpair splice stat statfs statx symlink symlinkat sync_file_range sysinfo tee time
timerfd_create timerfd_gettime timerfd_settime times truncate umask uname unlink unlinkat wait4
waitid write writev
"""
# Calls allowed depending on an argument: (index, comparison, mask or value, value).
_FCNTL = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    36,
    37,
    38,
    1030,
    1032,
)  # without those that make files send signals
_IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # terminal queries and harmless file requests
_CONDITIONAL = (
    ("clone", (0, _MASKED, _THREAD | _NAMESPACES, _THREAD)),
    ("prlimit64", (0, _EQUAL, 0, 0)),  # only of this process
    ("sendto", (4, _EQUAL, 0, 0)),  # without address: only to the connected peer
    *(("fcntl", (1, _EQUAL, command, 0)) for command in _FCNTL),
    *(("ioctl", (1, _EQUAL, command, 0)) for command in _IOCTL),
)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scope", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def landlock_version() -> int:
    """The kernel's Landlock version; 0 if it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _call(_CREATE_RULESET, None, 0, _ABI_VERSION_FLAG))


def libseccomp() -> ctypes.CDLL | None:
    """The seccomp library, if installed."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    return library


def readable() -> list[str]:
    """Files and directories that Python must be able to read."""
    python = [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/nix/store"]
    files = [os.path.realpath(sys.executable), "/etc/ld.so.cache"]
    return [path for path in (*files, *python, *system) if os.path.exists(path)]


def restrict_files(directory: str) -> None:
    """Restrict this process and its children: write below ``directory``, read ``readable()``."""
    version = landlock_version()
    files = _EXECUTE | _WRITE | _READ | _LIST | _CHANGE_TREE
    files |= _REFER if version > 1 else 0
    files |= _TRUNCATE if version > 2 else 0
    rules = _Ruleset(files, _BIND_AND_CONNECT, _ABSTRACT_SOCKETS_AND_SIGNALS)
    size = max((size for since, size in _RULESET_SIZES.items() if version >= since), default=8)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    for path, allowed in _file_rules(directory):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            allowed &= _OF_FILES
        rule = _PathRule(allowed & files, opened)
        _checked(_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
        os.close(opened)
    _checked(_libc().prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_call(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _file_rules(directory: str) -> Iterator[tuple[str, int]]:
    yield directory, -1
    yield os.devnull, _READ | _WRITE | _TRUNCATE
    for path in ("/dev/zero", "/dev/urandom", "/dev/random"):
        if os.path.exists(path):
            yield path, _READ
    for path in readable():
        yield path, _READ | _LIST | _EXECUTE


def restrict_calls(library: ctypes.CDLL) -> None:
    """Allow only the system calls above; others fail with EPERM."""
    context = ctypes.c_void_p(library.seccomp_init(_ERROR | errno.EPERM))
    rules: list[tuple[str, int, Sequence[tuple[int, int, int, int]]]] = [
        (
            "clone3",
            _ERROR | errno.ENOSYS,
            (),
        ),  # seccomp cannot read its flags; the C library falls back to clone
        *((name, _ALLOW, ()) for name in _CALLS.split()),
        *((name, _ALLOW, (comparison,)) for name, comparison in _CONDITIONAL),
    ]
    for name, action, comparisons in rules:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # the call exists on this architecture
            array = (_Comparison * len(comparisons))(*(_Comparison(*c) for c in comparisons))
            count = len(comparisons)
            _checked(library.seccomp_rule_add_array(context, action, number, count, array))
    _checked(library.seccomp_load(context))
    library.seccomp_release(context)


def limit(name: str, value: int) -> None:
    """Lower a resource limit permanently, if the system supports it."""
    number = getattr(resource, f"RLIMIT_{name}", None)
    if number is not None:
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    return int(_libc().syscall(number, *arguments))


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno() or -status, "the kernel refused a rule")


def main() -> None:
    """Restrict this process and replace it by the program."""
    limits, program = json.loads(sys.argv[1]), sys.argv[2]
    python = os.path.realpath(sys.executable)
    limit("CORE", 0)
    limit("CPU", limits["seconds"])
    limit("FSIZE", limits["file_bytes"])
    limit("NOFILE", 64)
    limit("AS", limits["bytes"])
    if limits["landlock"]:
        restrict_files(os.getcwd())
    if limits["seccomp"]:
        library = libseccomp()
        assert library is not None, "libseccomp was found by the parent"
        restrict_calls(library)
    else:
        limit("NPROC", limits["processes"])
    os.execv(python, [python, "-I", "-S", program])


if __name__ == "__main__":
    main()
