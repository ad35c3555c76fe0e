"""Counts the bytes autograd keeps for the backward pass, and says who keeps them.

    with saved_for_backward(model) as saved:
        loss = model(batch)
    assert saved.bytes == 34 * s * b * h
    print(saved.table())

Every tensor saved by an operator or by ``ctx.save_for_backward`` passes through autograd's
saved-tensor hooks. Rules of the count:

* A storage counts once, in full, however many operators save it or views of it: that is the
  memory which cannot be freed. The first to save it gets it in the table.
* Storages of the parameters of the given modules do not count, they exist anyway
  (``include_parameters=True`` counts them).
* ``bytes`` is the largest total held at one moment, so it may be read after the backward.
* A storage that is resized (``untyped_storage().resize_(0)`` frees a tensor whose value a later
  recomputation restores, as Megatron's ``CheckpointWithoutOutput`` does) counts at its new size
  from then on. Only resizing from Python inside the block is seen.
* Regions with saved-tensor hooks of their own (``torch.utils.checkpoint`` without re-entry,
  offloading to the host) decide themselves what to keep; only their inputs are seen here.
  Tensors hung on ``ctx`` as plain attributes are invisible to autograd, hence to this counter.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mindspeed.journal import Journal

_SKIPPED_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__)))


@dataclass(frozen=True)
class _Change:
    """A storage began (+) or ceased (-) to be held by at least one saved tensor."""

    nbytes: int
    module: str
    site: str


class _Holder:
    """What autograd keeps instead of the tensor; its death says that the tensor was released."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class SavedTensors:
    """The count; made by :func:`saved_for_backward`."""

    def __init__(self, ignored: set[int]):
        self._ignored = ignored
        self._holders: Counter[int] = Counter()
        self._first: dict[int, _Change] = {}
        self._changes: list[_Change] = []
        self._now = 0
        self._peak = 0
        self._peak_at = 0

    @property
    def bytes(self) -> int:
        """Largest number of bytes held at one moment."""
        return self._peak

    @property
    def live_bytes(self) -> int:
        """Bytes held now; 0 after a complete backward without ``retain_graph``."""
        return self._now

    def by_module(self) -> dict[str, int]:
        """Bytes held at the peak, by the innermost module whose forward saved them first."""
        return self._at_peak("module")

    def by_site(self) -> dict[str, int]:
        """Bytes held at the peak, by the source line outside torch that saved them first."""
        return self._at_peak("site")

    def table(self, by: str = "module") -> str:
        """A readable table, largest first; `by` is "module" or "site"."""
        rows = sorted(self._at_peak(by).items(), key=lambda row: -row[1])
        width = max([len(name) for name, _ in rows] + [len("total")])
        lines = [
            f"{name:<{width}}  {nbytes:>15,}" for name, nbytes in [*rows, ("total", self._peak)]
        ]
        return "\n".join(lines)

    def _at_peak(self, by: str) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for change in self._changes[: self._peak_at]:
            totals[getattr(change, by)] += change.nbytes
        return {name: nbytes for name, nbytes in totals.items() if nbytes}

    def _pack(self, tensor: torch.Tensor, module: str) -> _Holder:
        holder = _Holder(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return holder
        self._holders[key] += 1
        if self._holders[key] == 1:
            self._first[key] = _Change(storage.nbytes(), module, _call_site())
            self._add(self._first[key])
        weakref.finalize(holder, self._release, key).atexit = False
        return holder

    def _resized(self, key: int, nbytes: int) -> None:
        if (first := self._first.get(key)) is not None and first.nbytes != nbytes:
            self._first[key] = replace(first, nbytes=nbytes)
            self._add(replace(first, nbytes=nbytes - first.nbytes))

    def _release(self, key: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            first = self._first.pop(key)
            self._add(_Change(-first.nbytes, first.module, first.site))

    def _add(self, change: _Change) -> None:
        self._changes.append(change)
        self._now += change.nbytes
        if self._now > self._peak:
            self._peak = self._now
            self._peak_at = len(self._changes)


@contextmanager
def saved_for_backward(
    *modules: nn.Module, include_parameters: bool = False
) -> Iterator[SavedTensors]:
    """Counts what autograd saves inside the `with` block.

    Args:
        *modules: their parameters are left out of the count and their sub-modules named in the
            table; modules not given are named by class.
        include_parameters: count storages of parameters like any other.
    """
    ignored: set[int] = set()
    names: dict[nn.Module, str] = {}
    for module in modules:
        for name, child in module.named_modules():
            names.setdefault(child, name or type(child).__name__)
        if not include_parameters:
            ignored |= {p.untyped_storage()._cdata for p in module.parameters()}
    saved = SavedTensors(ignored)
    running: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        running.append(names.get(module, type(module).__name__))

    def leave(module: nn.Module, args: object, output: object) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> _Holder:
        return saved._pack(tensor, running[-1] if running else "(no module)")

    def unpack(holder: _Holder) -> torch.Tensor:
        return holder.tensor

    with ExitStack() as stack:
        stack.enter_context(_resizing_seen(saved._resized))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield saved


@contextmanager
def _resizing_seen(report: Callable[[int, int], None]) -> Iterator[None]:
    """Call ``report(storage key, bytes)`` after every ``UntypedStorage.resize_`` from Python."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        report(storage._cdata, storage.nbytes())
        return result

    journal = Journal()
    journal.set(torch.UntypedStorage, "resize_", resize_, owner="saved")
    try:
        yield
    finally:
        journal.undo()


def _call_site() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FOLDERS):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"
