"""What weight gradients that wait for their W need, in host memory meanwhile.

    swap.out(key, tensor)       the action O
    swap.back(key)              the action L

A schedule says when (:mod:`mindspeed.pipeline.schedule.weight_gradients`). The copies run on
streams of their own (:mod:`mindspeed.memory.host_copy`); the memory on the device is free as soon
as the copy to the host is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property

import torch

from mindspeed import device as devices
from mindspeed.device import Device
from mindspeed.memory.figures import SiteFigures
from mindspeed.memory.host_copy import OffloadedCopy, OnHost, Streams, can_copy, elements_of
from mindspeed.memory.host_pool import HostPool

Key = tuple[int, int]
"""Stage and micro-batch."""


class StashSwap:
    """Copies to the host and back, by stage and micro-batch.

    Args:
        device: whose memory is relieved; default: the one of this process.
        check: called with a stage and the bytes of one of its stashes when they exceed all before.

    Attributes:
        figures: bytes copied out and in.
    """

    def __init__(
        self, device: Device | None = None, check: Callable[[int, int], None] | None = None
    ) -> None:
        self.figures = SiteFigures()
        self._given, self._check, self._largest = device, check, 0
        self._made: tuple[Streams, HostPool] | None = None
        self._copies: dict[Key, dict[tuple[object, ...], OffloadedCopy]] = {}
        self._loaded: dict[Key, int] = {}
        self._unfinished: deque[OffloadedCopy] = deque()

    @cached_property
    def _device(self) -> Device:
        return self._given or devices.current()

    @property
    def pool(self) -> HostPool:
        """Host memory, pinned where the device can use that."""
        return self._means()[1]

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is worth a copy."""
        return can_copy(tensor, 1, self._device.name)

    def out(self, key: Key, tensor: torch.Tensor) -> OnHost:
        """Start to copy a tensor; equal elements of a key are copied once."""
        copies = self._copies.setdefault(key, {})
        elements = (tensor.untyped_storage()._cdata, *elements_of(tensor))
        if elements not in copies:
            self._check_host(key[0], tensor.nbytes + sum(copy.nbytes for copy in copies.values()))
            streams, pool = self._means()
            copies[elements] = OffloadedCopy(
                tensor,
                f"weight gradient of stage {key[0]}, micro-batch {key[1]}",
                streams,
                pool,
                self.figures,
                on_get=lambda: None,
                on_death=lambda: None,
            )
            self._unfinished.append(copies[elements])
        return OnHost(copies[elements], tensor)

    def back(self, key: Key) -> int:
        """Start to copy the tensors of a key back; returns their bytes."""
        copies = self._copies.get(key, {}).values()
        for copy in copies:
            copy.start()
        self._loaded[key] = sum(copy.nbytes for copy in copies)
        return self._loaded[key]

    def forget(self, key: Key) -> int:
        """The tensors of a key are about to be used up; returns the bytes that came back."""
        self._copies.pop(key, None)
        return self._loaded.pop(key, 0)

    def poll(self) -> None:
        """Free the tensors on the device whose copies are complete; never waits."""
        while self._unfinished and self._unfinished[0].written.query():
            self._unfinished.popleft().release()

    def _check_host(self, stage: int, nbytes: int) -> None:
        if self._check is not None and nbytes > self._largest:
            self._check(stage, nbytes)
        self._largest = max(self._largest, nbytes)

    def _means(self) -> tuple[Streams, HostPool]:
        if self._made is None:
            pinned = self._device.has("pinned_memory")
            self._made = Streams(self._device), HostPool(pinned=pinned)
        return self._made
