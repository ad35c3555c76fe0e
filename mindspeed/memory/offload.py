"""Host copies of a model's saved tensors: where they are, and in which order they come back.

Copies belong to the layer call in which they were saved, a group. When the backward of a layer call
begins, the rest of its group starts on its way back, and so does the group whose backward comes
next: the copies of one layer run while another computes.

Which group comes next is learned: a group is known by model chunk, layer, and its number among the
calls of this layer, so the order of any pipeline schedule repeats in every step. In the first step
the group before in forward order is taken.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator

import torch

from mindspeed import device as devices
from mindspeed.device import Device
from mindspeed.memory.figures import SiteFigures
from mindspeed.memory.host_copy import OffloadedCopy, Streams, can_offload
from mindspeed.memory.host_pool import HostPool

MIN_BYTES = 1 << 20
"""Smaller tensors are not worth a copy to the host."""
PREFETCH_BYTES = 1 << 30
"""Bytes that may be on their way back for layers whose backward has not begun."""

_Key = tuple[int, str, int]


class Group:
    """The host copies of one call of a layer.

    Attributes:
        key: Model chunk, layer, and number of the call.
        before: Key of the group before in forward order of the chunk, or None.
        copies: In the order in which they were saved.
        nbytes: Their bytes.
        reached: Whether its backward has begun.
    """

    def __init__(self, key: _Key, before: _Key | None) -> None:
        self.key, self.before = key, before
        self.copies: list[weakref.ref[OffloadedCopy]] = []
        self.nbytes = 0
        self.reached = False

    def waiting(self) -> Iterator[OffloadedCopy]:
        """Copies that are in host memory only, the one that backward needs first before others."""
        for reference in reversed(self.copies):
            if (copy := reference()) is not None and copy.waits:
                yield copy


class Offload:
    """Copies saved tensors to the host and back; the chunks of a model share one.

    Args:
        device: Whose memory is relieved; default: the one of this process.
        min_bytes: Smaller tensors stay.
        prefetch_groups: Layer calls ahead of backward whose copies start.
        prefetch_bytes: Most bytes of these.
        check: Called with the bytes of a layer call when they exceed all before.

    Attributes:
        pool: Of host memory.
        live: Copies that backward still needs.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        min_bytes: int = MIN_BYTES,
        prefetch_groups: int = 1,
        prefetch_bytes: int = PREFETCH_BYTES,
        check: Callable[[int], None] | None = None,
    ) -> None:
        self._device = device or devices.current()
        self.min_bytes = min_bytes
        self.pool = HostPool(pinned=self._device.has("pinned_memory"))
        self.live = 0
        self._streams = Streams(self._device)
        self._prefetch_groups, self._prefetch_bytes = prefetch_groups, prefetch_bytes
        self._check, self._largest = check, 0
        self._unfinished: deque[OffloadedCopy] = deque()
        self._groups: weakref.WeakValueDictionary[_Key, Group] = weakref.WeakValueDictionary()
        self._calls: Counter[tuple[int, str]] = Counter()
        self._newest: dict[int, _Key] = {}
        self._next: dict[_Key, _Key] = {}
        self._reached: _Key | None = None

    def begin(self, chunk: int, layer: str) -> Group:
        """A layer is called; returns the group of its copies."""
        if not self.live:  # nothing waits for backward: the calls are numbered from 0 again
            self._calls.clear()
        key = (chunk, layer, self._calls[chunk, layer])
        self._calls[chunk, layer] += 1
        group = self._groups[key] = Group(key, self._newest.get(chunk))
        self._newest[chunk] = key
        return group

    def end(self, group: Group) -> None:
        """The layer call has returned."""
        if group.nbytes > self._largest:
            self._largest = group.nbytes
            if self._check is not None:
                self._check(group.nbytes)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is worth a copy."""
        return can_offload(tensor, self.min_bytes, self._device.name)

    def save(
        self, tensor: torch.Tensor, group: Group, where: str, figures: SiteFigures
    ) -> OffloadedCopy:
        """Copy a tensor that :meth:`takes` allows."""
        self.live += 1
        copy = OffloadedCopy(
            tensor,
            where,
            self._streams,
            self.pool,
            figures,
            on_get=lambda: self.reach(group),
            on_death=self._forget,
        )
        group.copies.append(weakref.ref(copy))
        group.nbytes += copy.nbytes
        self._unfinished.append(copy)
        self.poll()
        return copy

    def poll(self) -> None:
        """Free the tensors on the device whose copies are complete; never waits."""
        while self._unfinished and self._unfinished[0].written.query():
            self._unfinished.popleft().release()

    def reach(self, group: Group) -> None:
        """The backward of a group's layer begins: bring it back, and then those that come next."""
        if group.reached:
            return
        group.reached = True
        if self._reached is not None:
            self._next[self._reached] = group.key
        self._reached = group.key
        self.poll()
        for copy in group.waiting():
            copy.start()
        budget = self._prefetch_bytes
        for coming in self._coming(group):
            for copy in coming.waiting():
                if copy.nbytes > budget:
                    return
                budget -= copy.nbytes
                copy.start()

    def _coming(self, group: Group) -> Iterator[Group]:
        known: Group | None = group
        for _ in range(self._prefetch_groups):
            assert known is not None
            key = self._next.get(known.key, known.before)
            known = self._groups.get(key) if key is not None else None
            if known is None or known.reached:
                return
            yield known

    def _forget(self) -> None:
        self.live -= 1
