"""Places of the storages that the backward pass needs: on the device, on the host, or nowhere.

A saved tensor keeps its storage alive (``holders``), or its owner pushed saved-tensor hooks of its
own and keeps whatever these returned (``packs``). For the second kind the place follows from what
can be observed:

* The packed value contains tensors: one of the same storage keeps it on the device, one of another
  storage in CPU memory is a copy on the host.
* The packed value is plain data, such as a number: a key to a table of the hooks' owner. The
  storage counts for as long as it lives. A later ``table_entry.copy_(tensor)`` into CPU memory is
  the copy on the host.
* Neither: the value is dropped, and will be computed again.

When the CPU is the training device, device and host memory are the same; a copy made by inner hooks
then counts as one on the host.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed.instruments.instrument import in_backward

Place = Literal["device", "host", "dropped"]
_PLAIN = (type(None), bool, int, float, str)
_Key = int | tuple[int, int]
_DEPTH = 4
"""Levels of objects in which tensors of a packed value are looked for."""


@dataclass(frozen=True)
class BytesChange:
    """Bytes that are held (+) or no longer held (-) in one place."""

    place: Place
    nbytes: int
    module: str
    site: str


@dataclass(eq=False)
class SavedStorage:
    """One storage.

    Attributes:
        key: Of the storage; a copy on the host may be a part of one, so it has its offset, too.
        alive: Keeps the address, not the memory, of the storage: no other one gets its key.
        nbytes: Live size; full is the one it had when it was saved.
        module: Whose forward saved it first, and at which source line.
        holders: Saved tensors of autograd itself.
        packs: Saved tensors given to inner hooks; kept_packs are those that keep it on the device.
        until_freed: Counts until it is freed: made by a recomputation, or brought back to the
            device, for a backward that has not used it yet.
        copies: Its copies on the host.
    """

    key: _Key
    alive: StorageWeakRef
    nbytes: int
    module: str
    site: str
    place: Place = "device"
    full: int = 0
    holders: int = 0
    packs: int = 0
    kept_packs: int = 0
    until_freed: bool = False
    copies: list[SavedStorage] = field(default_factory=list)
    counted: dict[Place, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.full = self.nbytes

    @property
    def needed(self) -> bool:
        """Whether the backward needs it."""
        return bool(self.holders or self.packs)

    def bytes_by_place(self) -> dict[Place, int]:
        """Bytes of the storage itself; its copies are counted on their own."""
        if self.place == "host":
            return {"host": 0 if self.alive.expired() else self.nbytes}
        held = self.holders or self.kept_packs or self.until_freed
        device = self.nbytes if held and not self.alive.expired() else 0
        dropped = self.full - device if self.needed and not self.copies else 0
        return {"device": device, "dropped": max(dropped, 0)}


class Storages:
    """The account of all storages, by key (``storage._cdata``).

    Args:
        ignored: Keys of storages that do not count.
    """

    def __init__(self, ignored: set[int]) -> None:
        self.changes: list[BytesChange] = []
        self.now: Counter[Place] = Counter()
        self.peak: Counter[Place] = Counter()
        self.peak_at = 0  # number of changes until the peak of the device
        self._ignored = ignored
        self._saved: dict[_Key, SavedStorage] = {}
        self._watched: dict[_Key, SavedStorage] = {}  # may be freed without a word of autograd
        self._contiguous: dict[int, tuple[StorageWeakRef, SavedStorage]] = {}

    def hold(self, tensor: torch.Tensor, module: str, site: str) -> SavedStorage | None:
        """Count a tensor that autograd saves; None if it does not count."""
        saved = self._of(tensor.untyped_storage(), module, site)
        if saved is not None:
            saved.holders += 1
            self._count(saved)
        return saved

    def release(self, saved: SavedStorage) -> None:
        """The tensor of :meth:`hold` is gone."""
        saved.holders -= 1
        self._count(saved)

    def pack(
        self, tensor: torch.Tensor, packed: Any, module: str, site: str, *, again: bool = False
    ) -> tuple[SavedStorage, bool, list[SavedStorage]] | None:
        """Count a tensor that inner hooks turned into ``packed``.

        Args:
            packed: What the hooks made of it.
            module: Whose forward saves it.
            again: Computed a second time, for a backward that has not begun.

        Returns:
            What :meth:`drop_pack` needs later; None where it does not count.
        """
        storage = tensor.untyped_storage()
        saved = self._of(storage, module, site)
        if saved is None:
            return None
        kept, copies = _is_key(packed), []
        for found in _tensors_in(packed):
            if found.untyped_storage()._cdata == storage._cdata:
                kept = True
            elif found.device.type == "cpu":
                copies.append(self._add_copy(saved, found))
        again = again or in_backward()
        if kept and again and not saved.needed:
            self.watch(tensor, module, site)  # recomputed: a table may keep it for the backward
        elif kept:
            self._watched[storage._cdata] = saved
        saved.packs += 1
        saved.kept_packs += kept
        self._count(saved)
        return saved, kept, copies

    def watch(self, tensor: torch.Tensor, module: str, site: str) -> None:
        """Count a tensor that is kept for the backward, until it is freed."""
        storage = tensor.untyped_storage()
        saved = self._of(storage, module, site)
        if saved is not None and not saved.needed:
            saved.until_freed = True
            self._watched[storage._cdata] = saved
            self._count(saved)

    def drop_pack(self, saved: SavedStorage, kept: bool, copies: list[SavedStorage]) -> None:
        """The packed value is gone."""
        saved.packs -= 1
        saved.kept_packs -= kept
        for copy in copies if saved.packs else list(saved.copies):
            self._end(copy)
            if copy in saved.copies:
                saved.copies.remove(copy)
        self._count(saved)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size."""
        self.settle()
        if (saved := self._saved.get(storage._cdata)) is not None:
            saved.nbytes = storage.nbytes()
            self._count(saved)

    def made_contiguous(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """A tensor was copied on its way to the host."""
        saved = self._saved.get(source.untyped_storage()._cdata)
        if saved is not None and saved.packs and source is not result:
            storage = result.untyped_storage()
            self._contiguous[storage._cdata] = StorageWeakRef(storage), saved

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``target.copy_(source)``: to the host, or back from it."""
        key = source.untyped_storage()._cdata
        saved = self._saved.get(_host_key(source)) or self._saved.get(key)
        if saved is None and key in self._contiguous:
            saved = self._contiguous[key][1]
        if saved is None or target.untyped_storage()._cdata == key:
            return
        if saved.place == "host":
            self.watch(target, saved.module, saved.site)
        elif saved.packs and target.device.type == "cpu" and target.numel() == source.numel():
            self._add_copy(saved, target)
            self._count(saved)

    def settle(self) -> None:
        """Notice which storages were freed since the last event."""
        for key, saved in list(self._watched.items()):
            if saved.alive.expired():
                saved.until_freed = False
                del self._watched[key]
                self._count(saved)

    def _of(self, storage: torch.UntypedStorage, module: str, site: str) -> SavedStorage | None:
        self.settle()
        key = storage._cdata
        if key in self._ignored:
            return None
        if key not in self._saved:
            self._saved[key] = SavedStorage(
                key, StorageWeakRef(storage), storage.nbytes(), module, site
            )
        return self._saved[key]

    def _add_copy(self, saved: SavedStorage, tensor: torch.Tensor) -> SavedStorage:
        storage, key = tensor.untyped_storage(), _host_key(tensor)
        if (old := self._saved.get(key)) is not None:
            self._end(old)  # a pool of host memory gives the same place out anew
        copy = SavedStorage(
            key, StorageWeakRef(storage), tensor.nbytes, saved.module, saved.site, "host"
        )
        self._saved[key] = self._watched[key] = copy
        saved.copies.append(copy)
        self._count(copy)
        return copy

    def _end(self, copy: SavedStorage) -> None:
        copy.nbytes = 0
        self._watched.pop(copy.key, None)
        self._count(copy)

    def _count(self, saved: SavedStorage) -> None:
        for place, nbytes in saved.bytes_by_place().items():
            if change := nbytes - saved.counted.get(place, 0):
                saved.counted[place] = nbytes
                self.changes.append(BytesChange(place, change, saved.module, saved.site))
                self.now[place] += change
                if self.now[place] > self.peak[place]:
                    self.peak[place] = self.now[place]
                    self.peak_at = len(self.changes) if place == "device" else self.peak_at
        if not saved.needed and not any(saved.counted.values()):
            self._forget(saved)

    def _forget(self, saved: SavedStorage) -> None:
        if self._saved.get(saved.key) is saved:
            del self._saved[saved.key]
        for alias, (_, origin) in list(self._contiguous.items()):
            if origin is saved:
                del self._contiguous[alias]


def _host_key(tensor: torch.Tensor) -> _Key:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size()


def _is_key(packed: Any) -> bool:
    if isinstance(packed, tuple):
        return all(map(_is_key, packed))
    return isinstance(packed, _PLAIN)


def _tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors in containers and in attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (*_PLAIN, type)):
        for part in _parts(value):
            yield from _tensors_in(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value) or not callable(value):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from (getattr(value, name) for name in slots if hasattr(value, name))
        yield from getattr(value, "__dict__", {}).values()
