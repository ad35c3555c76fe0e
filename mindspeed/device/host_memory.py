"""Host memory of this process: the CPU counterpart of the counters of a caching allocator.

Linux reports the resident set (``/proc/self/statm``) and its peak (``VmHWM``), and lets a process
reset the peak. Both cover the whole process, Python and libraries included, in units of
pages. For exact bytes of live tensors use :func:`mindspeed.device.track_memory`.
"""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def resident() -> int:
    """Bytes of this process in physical memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def peak_resident() -> int:
    """Largest :func:`resident` since the process began or :func:`reset_peak` was called."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM:"):
                return max(int(line.split()[1]) * 1024, resident())
    return resident()


def reset_peak() -> bool:
    """Reset the peak; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _meminfo(field: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def total() -> int:
    """Most bytes that this process may use: physical memory or the limit of its cgroup."""
    physical = _meminfo("MemTotal")
    for path in _CGROUP_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        return min(physical, limit)
    return physical


def available() -> int:
    """Bytes that can still be allocated without swapping."""
    return min(_meminfo("MemAvailable"), total())
