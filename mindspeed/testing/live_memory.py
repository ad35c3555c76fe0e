"""Counts the bytes of all tensors that live in a block, and the most that lived at once.

    with LiveMemory() as memory:
        memory.kind = "weights"
        model = build()
        memory.kind = "activations"
        model(x).sum().backward()
    memory.peak, memory.at_peak["activations"]

It watches results of operators through a ``TorchDispatchMode``, so storages that existed before the
block do not count, nor those that no operator returns (workspaces inside a kernel). A storage
counts with its live size: one that is resized to nothing counts nothing. Real tensors and
FakeTensors give the same figures.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.journal import Journal
from mindspeed.profiling.instrument import Instrument


class LiveMemory(Instrument):
    """Context manager; its figures may be read inside and after the block.

    Attributes:
        kind: set by the caller: what the storages are that are made from now on.
        now: bytes alive, by kind.
        peak: the most bytes alive at once since the last :meth:`restart`.
        at_peak: these bytes by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "other"
        self.now: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._storages: dict[int, tuple[int, str]] = {}  # key -> bytes, kind
        self._total = 0
        self.mode = _Mode(self)

    def enter_contexts(self, stack: ExitStack) -> None:
        """Notice storages that are resized, too."""
        resize, journal = torch.UntypedStorage.resize_, Journal()

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result = resize(storage, nbytes)
            self._resized(storage)
            return result

        journal.set(torch.UntypedStorage, "resize_", resize_, owner="live memory")
        stack.callback(journal.undo)
        super().enter_contexts(stack)

    @property
    def total(self) -> int:
        """Bytes alive now."""
        return self._total

    def restart(self) -> None:
        """The peak is what is alive now."""
        self.peak, self.at_peak = self._total, Counter(self.now)

    def claim(self, tensor: torch.Tensor, kind: str) -> None:
        """The storage of a tensor (any shape and dtype) is of this kind."""
        key = tensor.untyped_storage()._cdata
        if key in self._storages:
            nbytes, before = self._storages[key]
            self._storages[key] = nbytes, kind
            self.now[before] -= nbytes
            self.now[kind] += nbytes

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            if self._storages[key][0] != storage.nbytes():
                self._resized(storage)
            return
        self._storages[key] = 0, self.kind
        weakref.finalize(storage, self._freed, key).atexit = False
        self._change(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._storages:
            self._change(storage._cdata, storage.nbytes())

    def _change(self, key: int, nbytes: int) -> None:
        before, kind = self._storages[key]
        self._storages[key] = nbytes, kind
        self.now[kind] += nbytes - before
        self._total += nbytes - before
        if self._total > self.peak:
            self.restart()

    def _freed(self, key: int) -> None:
        nbytes, kind = self._storages.pop(key)
        self.now[kind] -= nbytes
        self._total -= nbytes


class _Mode(TorchDispatchMode):
    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._memory._see(leaf)
        return result
