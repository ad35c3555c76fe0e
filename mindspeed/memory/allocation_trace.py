"""Records which storages live when, for the allocator simulation; real tensors or FakeTensors.

    trace = AllocationTrace(model.parameters())
    with trace:
        model(batch).backward()
    with trace, trace.long_lived():
        optimizer.step()
    peaks = CachingAllocator(Policy(expandable=True)).replay(trace.events)

A dispatch mode sees the results of every operator. A storage is allocated when an operator first
returns it and freed when its last tensor is gone, as on a device; workspaces inside of operators
are invisible.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.memory.caching_allocator import Event


class AllocationTrace(TorchDispatchMode):
    """Appends to ``events`` while it is entered; frees also afterwards.

    Args:
        existing: tensors that were allocated before, in this order, and are long-lived.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._count = 0
        self._long_lived = False
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        with self.long_lived():
            for tensor in existing:
                self._see(tensor)

    @contextlib.contextmanager
    def long_lived(self) -> Iterator[None]:
        """Allocations inside are those of model, gradient buffers and optimizer states."""
        before, self._long_lived = self._long_lived, True
        try:
            yield
        finally:
            self._long_lived = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse tensors and wrapper subclasses have no storage
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live or not nbytes:
            return
        index, self._count = self._count, self._count + 1
        self.events.append(Event(index, nbytes, self._long_lived))
        forget = functools.partial(self._forget, key)
        self._live[key] = index, weakref.ref(storage, forget)

    def _forget(self, key: int, _: Any) -> None:
        index, _ = self._live.pop(key)
        self.events.append(Event(index, 0))
