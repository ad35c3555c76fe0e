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

The tensors of a collective live until its ``wait``, also if the program has dropped them, as those
of NCCL and HCCL do; those of a message between two ranks as long as the program keeps the handle
that it has waited for, as gloo and NCCL hold them in it.

Memory that :func:`mindspeed.device.host_tensor` and ``host_mapped_tensor`` make, or that is claimed
as such, is the host's: it counts apart.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mindspeed.device import host_tensors
from mindspeed.device.wrapped_tensors import any_wraps, held
from mindspeed.instruments.instrument import Instrument, arguments_of
from mindspeed.journal import Journal

HOST = "host"
"""Kind of memory that is not the device's."""


class LiveMemory(Instrument):
    """Context manager; its figures may be read inside and after the block.

    Attributes:
        kind: set by the caller: what the storages are that are made from now on.
        now: bytes alive, by kind; those of kind "host" are not the device's.
        peak: the most bytes of the device alive at once since the last :meth:`restart`.
        at_peak: these bytes by kind.
        host: bytes of host memory alive.
        host_peak: the most of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "other"
        self.now: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.host = self.host_peak = 0
        self._storages: dict[int, tuple[int, str]] = {}  # key -> bytes, kind
        self._references: dict[int, Any] = {}
        self._total = 0
        self._on_host = False
        self._sent: dict[int, list[torch.Tensor]] = {}  # id of a Work -> tensors
        self._latest: Work | None = None  # nobody else may hold it yet
        self.mode: TorchDispatchMode = _Mode(self)

    def enter_contexts(self, stack: ExitStack) -> None:
        """Notice storages that are resized, and memory of the host, too."""
        resize, journal = torch.UntypedStorage.resize_, Journal()

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result = resize(storage, nbytes)
            self._resized(storage)
            return result

        journal.set(torch.UntypedStorage, "resize_", resize_, owner="live memory")
        for name in ("empty", "mapped"):
            made = self._made_on_host(getattr(host_tensors, name))
            journal.set(host_tensors, name, made, owner="live memory")
        for kind in kinds_of(Work):
            journal.set(kind, "wait", self._awaited(kind.wait), owner="live memory")
        stack.callback(journal.undo)
        super().enter_contexts(stack)

    @property
    def total(self) -> int:
        """Bytes alive now on the device."""
        return self._total

    def restart(self) -> None:
        """The peak is what is alive now."""
        self._note_peak()

    def kind_of_new(self) -> str:
        """Kind of a storage that is made now."""
        return self.kind

    def claim(self, tensor: torch.Tensor, kind: str) -> None:
        """The storage of a tensor is of this kind; host memory stays it."""
        for one in held(tensor):
            key = one.untyped_storage()._cdata
            nbytes, before = self._storages.get(key, (0, HOST))
            if before != HOST:
                self._change(key, 0)
                self._storages[key] = 0, kind
                self._change(key, nbytes)

    def see(self, tensor: torch.Tensor) -> None:
        """A tensor that exists; its storage may be new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is not None:
            if known[0] != storage.nbytes():
                self._resized(storage)
            return
        self._storages[key] = 0, HOST if self._on_host else self.kind_of_new()
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key))
        self._change(key, storage.nbytes())

    def hold(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep inputs of a ``c10d`` operator alive until its ``wait``, or without a handle.

        The handle of a message between two ranks keeps them as long as it lives.
        """
        self._latest = None
        works = [x for x in tree_leaves(result) if isinstance(x, torch.ScriptObject)]
        named = arguments_of(func, args, kwargs) if works else {}
        if not named.get("async_op", True):
            return  # on the stream of the program
        for one in works:
            self._latest = work = Work.unbox(one)
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if func.overloadpacket in _BETWEEN_TWO:
                self.passed(given, ProcessGroup.unbox(named["process_group"]))
                weakref.finalize(work, given.clear).atexit = False
                continue
            self._sent[id(work)] = given
            weakref.finalize(work, self._sent.pop, id(work), None).atexit = False

    def passed(self, tensors: list[torch.Tensor], group: ProcessGroup) -> None:
        """Tensors of a message between two ranks of a group, when it begins."""

    def _made_on_host(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._on_host = True
            try:
                return make(*args, **kwargs)
            finally:
                self._on_host = False

        return run

    def _awaited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """gloo copies results while it is waited for; that is no memory of a device's program."""

        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = wait(work, *args, **kwargs)
            self._sent.pop(id(work), None)
            if work is self._latest:
                self._latest = None
            return result

        return run

    def _note_peak(self) -> None:
        self.peak, self.at_peak = self._total, Counter(self.now)
        self.at_peak.pop(HOST, None)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._storages:
            self._change(storage._cdata, storage.nbytes())

    def _change(self, key: int, nbytes: int) -> None:
        before, kind = self._storages[key]
        self._storages[key] = nbytes, kind
        self.now[kind] += nbytes - before
        if kind == HOST:
            self.host += nbytes - before
            self.host_peak = max(self.host_peak, self.host)
            return
        self._total += nbytes - before
        if self._total > self.peak:
            self._note_peak()

    def _freed(self, key: int) -> None:
        nbytes, kind = self._storages.pop(key)
        del self._references[key]
        self.now[kind] -= nbytes
        if kind == HOST:
            self.host -= nbytes
        else:
            self._total -= nbytes


_BETWEEN_TWO = (
    torch.ops.c10d.send,
    torch.ops.c10d.recv_,
    torch.ops.c10d.recv_any_source_,
)


def kinds_of(work: Any) -> Iterator[Any]:
    """``Work`` and the classes derived from it that wait in a way of their own (``fake``)."""
    if "wait" in vars(work):
        yield work
    for kind in work.__subclasses__():
        yield from kinds_of(kind)


class _Mode(TorchDispatchMode):
    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._memory.hold(func, args, kwargs, result)
        for tensor in tensors_of(result):
            self._memory.see(tensor)
        return result


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Tensors that an operator returned: one, or those in lists and tuples of it."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in tensors_of(item)]
    return []
