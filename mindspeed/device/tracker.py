"""Exact bytes of live tensor storages, on any device.

    with track_memory() as memory:
        loss = model(batch); loss.backward()
    print(memory.peak, memory.current)

A dispatch mode sees the arguments and results of every operator. A storage counts once, however
many tensors view it, from the moment it is first seen until it is freed; ``resize_`` changes its
size at once. Earlier tensors count from the first operator that uses them, or from the beginning if
they are passed to :func:`track_memory`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps, held
from mindspeed.journal import Journal

_active: list[MemoryTracker] = []


def active() -> MemoryTracker | None:
    """The innermost active tracker, or None."""
    return _active[-1] if _active else None


class MemoryTracker(TorchDispatchMode):
    """Counts live storages; see :func:`track_memory`."""

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.current = self.peak = self.storages = self.peak_storages = 0
        self._journal = Journal()
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in existing:
            for one in held(tensor):
                self._see(one)
        self.reset_peak()

    def reset_peak(self) -> None:
        self.peak, self.peak_storages = self.current, self.storages

    def __enter__(self) -> MemoryTracker:
        self._journal.set(torch.UntypedStorage, "resize_", self._resize(), owner="tracker")
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _active.remove(self)
        self._journal.undo()

    def _resize(self) -> Callable[..., Any]:
        """``UntypedStorage.resize_``, which no dispatch mode sees."""
        original = torch.UntypedStorage.resize_

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._count(storage)
            return result

        return resize_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse tensors and wrapper subclasses have no storage
        self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            self._refs[key] = weakref.ref(storage, functools.partial(self._forget, key))
            self.storages += 1
            self.peak_storages = max(self.peak_storages, self.storages)
        if known != size:
            self._sizes[key] = size
            self.current += size - (known or 0)
            self.peak = max(self.peak, self.current)

    def _forget(self, key: int, _: Any = None) -> None:
        self._refs.pop(key, None)
        size = self._sizes.pop(key, None)
        if size is not None:
            self.current -= size
            self.storages -= 1


def track_memory(*existing: Any) -> MemoryTracker:
    """Context manager that counts the exact bytes of live tensor storages.

    Args:
        existing: tensors, modules or containers of tensors that count from the beginning.
    """
    tensors: list[torch.Tensor] = []
    for item in existing:
        if isinstance(item, torch.nn.Module):
            tensors += [*item.parameters(), *item.buffers()]
            tensors += [p.grad for p in item.parameters() if p.grad is not None]
        else:
            tensors += [leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor)]
    return MemoryTracker(tensors)
