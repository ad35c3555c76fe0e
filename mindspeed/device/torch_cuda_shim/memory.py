"""torch.cuda's memory statistics from host memory.

Without a tracker: resident set and its peak of the whole process. Inside
:func:`mindspeed.device.track_memory`: exact bytes of live tensor storages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from mindspeed.device import host_memory, tracker


def memory_allocated(device: Any = None) -> int:
    """Bytes in use now."""
    active = tracker.active()
    return active.current if active else host_memory.resident()


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes in use since the last reset."""
    active = tracker.active()
    return active.peak if active else host_memory.peak_resident()


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the operating system now."""
    return max(memory_allocated(), host_memory.resident())


def max_memory_reserved(device: Any = None) -> int:
    """Most bytes taken from the operating system since the last reset."""
    return max(max_memory_allocated(), host_memory.peak_resident())


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start new peaks."""
    active = tracker.active()
    if active:
        active.reset_peak()
    host_memory.reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Totals are not kept: nothing to reset."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(available, total) bytes."""
    return host_memory.available(), host_memory.total()


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    """The caching allocator's keys; counters that a CPU has not are 0."""
    allocated, peak = memory_allocated(), max_memory_allocated()
    reserved, reserved_peak = memory_reserved(), max_memory_reserved()
    active = tracker.active()
    blocks, blocks_peak = (active.storages, active.peak_storages) if active else (0, 0)
    values = {
        "allocated_bytes": (allocated, peak),
        "active_bytes": (allocated, peak),
        "requested_bytes": (allocated, peak),
        "reserved_bytes": (reserved, reserved_peak),
        "inactive_split_bytes": (0, 0),
        "allocation": (blocks, blocks_peak),
        "active": (blocks, blocks_peak),
        "segment": (0, 0),
        "inactive_split": (0, 0),
    }
    stats: OrderedDict[str, int] = OrderedDict()
    for name, (current, most) in values.items():
        for pool in ("all", "small_pool", "large_pool"):
            stats[f"{name}.{pool}.current"] = 0 if pool == "small_pool" else current
            stats[f"{name}.{pool}.peak"] = 0 if pool == "small_pool" else most
            stats[f"{name}.{pool}.allocated"] = 0
            stats[f"{name}.{pool}.freed"] = 0
    for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc"):
        stats[name] = 0
    stats["num_device_free"] = 0
    stats["max_split_size"] = -1
    return stats


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """:func:`memory_stats` with one level of dictionaries per dot."""
    tree: dict[str, Any] = {}
    for key, value in memory_stats().items():
        *path, leaf = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return tree


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """Three lines for people."""
    mib = 1 << 20
    return (
        f"memory of this process on the CPU: {memory_allocated() / mib:.1f} MiB allocated\n"
        f"peak: {max_memory_allocated() / mib:.1f} MiB\n"
        f"resident: {host_memory.resident() / mib:.1f} MiB of {host_memory.total() / mib:.1f} MiB"
    )


def _snapshot(*_: Any, **__: Any) -> dict[str, Any]:
    return {"segments": [], "device_traces": []}


def _nothing(*_: Any, **__: Any) -> None:
    """There is no cache to empty and no history to record."""


FUNCTIONS = {
    "memory_allocated": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "memory_reserved": memory_reserved,
    "max_memory_reserved": max_memory_reserved,
    "memory_cached": memory_reserved,
    "max_memory_cached": max_memory_reserved,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_max_memory_allocated": reset_peak_memory_stats,
    "reset_max_memory_cached": reset_peak_memory_stats,
    "reset_accumulated_memory_stats": reset_accumulated_memory_stats,
    "mem_get_info": mem_get_info,
    "memory_stats": memory_stats,
    "memory_stats_as_nested_dict": memory_stats_as_nested_dict,
    "memory_summary": memory_summary,
    "empty_cache": _nothing,
    "memory_snapshot": _snapshot,
    "_snapshot": _snapshot,
    "_record_memory_history": _nothing,
    "_dump_snapshot": _nothing,
}
