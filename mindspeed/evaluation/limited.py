"""Runs in the child, before a generated program: give up what it must not have, then become it.

    python -I -S limited.py '{"seconds": 10, "bytes": ..., "processes": ...}' program.py

Only the standard library, because ``-I -S`` leaves nothing else to import. Landlock [1] (Linux 5.13
and later, needs no rights) takes away writing outside the working directory and, from 6.7 on, TCP;
it holds for root too and cannot be taken back. Without it the resource limits remain.

[1] https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ABI_VERSION_FLAG = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVILEGES = 38

# write a file; remove and make directories, files, devices, sockets, pipes and links
_WRITE = 1 << 1
_CHANGE_TREE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_BIND_AND_CONNECT = 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 without."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _call(_CREATE_RULESET, None, 0, _ABI_VERSION_FLAG))


def write_only_below(directory: str) -> None:
    """This process and all it starts write below ``directory`` only, and use no TCP."""
    version = landlock_version()
    if not version:
        return
    files = _WRITE | _CHANGE_TREE
    files |= _REFER if version > 1 else 0
    files |= _TRUNCATE if version > 2 else 0
    rules = _Ruleset(files, _BIND_AND_CONNECT)
    size = ctypes.sizeof(rules) if version > 3 else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    for path, allowed in ((directory, files), (os.devnull, files & (_WRITE | _TRUNCATE))):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathRule(allowed, opened)
        _checked(_call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
        os.close(opened)
    _checked(_libc().prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_call(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def limit(name: str, value: int) -> None:
    """Lower a resource limit for good, where the system has it."""
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
        raise OSError(ctypes.get_errno(), "Landlock refused a rule")


def main() -> None:
    """Limit this process and become the program."""
    limits, program = json.loads(sys.argv[1]), sys.argv[2]
    write_only_below(os.getcwd())
    limit("CORE", 0)
    limit("CPU", limits["seconds"])
    limit("FSIZE", limits["file_bytes"])
    limit("NOFILE", 64)
    limit("NPROC", limits["processes"])
    limit("AS", limits["bytes"])
    os.execv(sys.executable, [sys.executable, "-I", "-S", program])


if __name__ == "__main__":
    main()
