"""Host memory for copies of activations, which is given out again and again.

Pinning pages takes milliseconds and stalls the device, so memory comes in slabs, and blocks return
to a free list of their size class: once a step has seen all its sizes, no more slabs are made.

Slabs are powers of two, because torch's allocator of pinned memory rounds up to these.

A :class:`HostLimit` refuses copies for which host memory is too small, before they fill it: the
first layer call that copies says how large a layer call is. The host holds as many of them as are
in flight at once in the pipeline schedule, for every rank that runs on it.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed import device
from mindspeed.device import host_memory
from mindspeed.errors import ConfigError

ALIGNMENT = 512
SLAB = 1 << 26
"""Bytes of a slab; one block may need a larger one."""


class HostBlock:
    """Bytes of host memory, which return to their pool when this object dies.

    Args:
        memory: uint8 [n].
        read: See below.
        give_back: Called with the last ``read``.

    Attributes:
        read: Event after the last copy from the memory to the device, or None. Who writes next
            has to wait for it on the device: that copy may still be queued.
    """

    __slots__ = ("_give_back", "memory", "read")

    def __init__(self, memory: torch.Tensor, read: Any, give_back: Callable[[Any], None]) -> None:
        self.memory, self.read, self._give_back = memory, read, give_back

    def __del__(self) -> None:
        self._give_back(self.read)


class HostPool:
    """Blocks of host memory by size class.

    Args:
        pinned: Lock the memory, for copies that run next to computation.
        slab: Bytes of a slab.

    Attributes:
        slabs: Slabs made so far; constant in the steady state.
        reserved: Their bytes.
        used: Bytes in blocks that are given out.
    """

    def __init__(self, *, pinned: bool, slab: int = SLAB) -> None:
        self._pinned, self._slab_bytes = pinned, slab
        self.slabs = self.reserved = self.used = 0
        self._free: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> HostBlock:
        """A block of ``nbytes`` bytes, at least one."""
        size = size_class(nbytes)
        if self._free[size]:
            memory, read = self._free[size].pop()
        else:
            memory, read = self._cut(size), None
        self.used += size
        return HostBlock(memory[:nbytes], read, functools.partial(self._give_back, memory))

    def _give_back(self, memory: torch.Tensor, read: Any) -> None:
        self.used -= memory.numel()
        self._free[memory.numel()].append((memory, read))

    def _cut(self, size: int) -> torch.Tensor:
        if self._rest.numel() < size:
            self._add_slab(max(self._slab_bytes, 1 << (size - 1).bit_length()))
        memory, self._rest = self._rest[:size], self._rest[size:]
        return memory

    def _add_slab(self, size: int) -> None:
        self._rest = device.host_tensor(size, torch.uint8, pinned=self._pinned)
        self.slabs += 1
        self.reserved += size


def size_class(nbytes: int) -> int:
    """Bytes of the block for ``nbytes``: eight classes between two powers of two."""
    step = max(ALIGNMENT, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


FRACTION = 0.8
"""Of the available memory; the rest is for data workers and writers of checkpoints."""
_MIB = 1 << 20


@dataclass(frozen=True)
class HostLimit:
    """The limit of one rank.

    Attributes:
        flag: For the message.
        calls: Returns how many layer calls wait for backward at once.
        ranks: Of this host.
        available: Returns free bytes of the host, before the first copy.
        unit: What a call is, for the message.
        remedy: What else to do, for the message.
    """

    flag: str
    calls: Callable[[], int]
    ranks: int
    available: Callable[[], int] = host_memory.available
    unit: str = "layer calls in flight"
    remedy: str = "name fewer modules in --swap-modules, recompute some (--recompute-num-layers)"

    def check(self, nbytes: int) -> None:
        """Refuse layer calls with host copies of ``nbytes`` bytes.

        Raises:
            ConfigError: They need more than 80 % of the available memory; gives the numbers.
        """
        calls, available = self.calls(), self.available()
        needed = nbytes * calls * self.ranks
        if needed > FRACTION * available:
            raise ConfigError(
                f"{self.flag}: the copies of activations need {needed / _MIB:,.0f} MiB of host "
                f"memory ({nbytes / _MIB:,.1f} MiB for each of {calls} {self.unit}, "
                f"{self.ranks} ranks on this host), but {available / _MIB:,.0f} MiB are available, "
                f"of which {FRACTION:.0%} may be used; {self.remedy}, or use more hosts"
            )


def ranks_of_host() -> int:
    """Ranks of this job that run on this host."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    return int(ranks or min(int(os.environ.get("WORLD_SIZE") or 1), device.current().count()))
