"""Counts the bytes autograd keeps for the backward pass, where, and says who keeps them.

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
* Hooks pushed inside the block (``torch.utils.checkpoint`` without re-entry, offloading to the
  host) decide themselves what to keep: ``bytes`` has what they keep on the device,
  ``host_bytes`` their copies in host memory, ``dropped_bytes`` what they keep nowhere, because
  it will be computed again. :mod:`mindspeed.instruments.saved_storages` says how that is observed.
* Tensors hung on ``ctx`` as plain attributes are invisible to autograd, hence to this counter.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mindspeed.instruments.saved_storages import Storages
from mindspeed.journal import Journal

_SKIPPED_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__)))


class _Holder:
    """Kept by autograd instead of a saved value; its deletion means that the value was released."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class SavedTensors:
    """The count; made by :func:`saved_for_backward`."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages

    @property
    def bytes(self) -> int:
        """Largest number of bytes held on the device at one moment."""
        return self._storages.peak["device"]

    @property
    def host_bytes(self) -> int:
        """Largest number of bytes of copies in host memory at one moment."""
        return self._storages.peak["host"]

    @property
    def dropped_bytes(self) -> int:
        """Largest number of bytes at one moment that the backward has to compute again."""
        return self._storages.peak["dropped"]

    @property
    def live_bytes(self) -> int:
        """Bytes held on the device now; 0 after a complete backward without ``retain_graph``."""
        self._storages.settle()
        return self._storages.now["device"]

    @property
    def live_host_bytes(self) -> int:
        """Bytes of copies in host memory now."""
        self._storages.settle()
        return self._storages.now["host"]

    def by_module(self) -> dict[str, int]:
        """Bytes on the device at its peak, by the innermost module whose forward saved them."""
        return self._at_peak("module")

    def by_site(self) -> dict[str, int]:
        """Bytes on the device at its peak, by the source line outside torch that saved them."""
        return self._at_peak("site")

    def table(self, by: str = "module") -> str:
        """A readable table of the device, largest first; `by` is "module" or "site"."""
        rows = sorted(self._at_peak(by).items(), key=lambda row: -row[1])
        width = max([len(name) for name, _ in rows] + [len("total")])
        lines = [
            f"{name:<{width}}  {nbytes:>15,}" for name, nbytes in [*rows, ("total", self.bytes)]
        ]
        return "\n".join(lines)

    def _at_peak(self, by: str) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for change in self._storages.changes[: self._storages.peak_at]:
            if change.place == "device":
                totals[getattr(change, by)] += change.nbytes
        return {name: nbytes for name, nbytes in totals.items() if nbytes}


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
    storages = Storages(ignored)
    running: list[str] = []

    def enter(module: nn.Module, args: object) -> None:
        running.append(names.get(module, type(module).__name__))

    def leave(module: nn.Module, args: object, output: object) -> None:
        running.pop()

    def module_and_site() -> tuple[str, str]:
        return running[-1] if running else "(no module)", _call_site()

    def pack(tensor: torch.Tensor) -> _Holder:
        holder = _Holder(tensor)
        if (saved := storages.hold(tensor, *module_and_site())) is not None:
            weakref.finalize(holder, storages.release, saved).atexit = False
        return holder

    def inner(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], _Holder]:
        def pack_inside(tensor: torch.Tensor) -> _Holder:
            try:
                holder = _Holder(pack(tensor))
            except BaseException:  # the early stop of a recomputation, which has kept the tensor
                storages.watch(tensor, *module_and_site())
                raise
            again = getattr(pack, "second_run", False)
            found = storages.pack(tensor, holder.value, *module_and_site(), again=again)
            if found is not None:
                weakref.finalize(holder, storages.drop_pack, *found).atexit = False
            return holder

        return pack_inside

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.value)
        )
        stack.enter_context(_observing(storages, inner))
        yield SavedTensors(storages)


@contextmanager
def _observing(storages: Storages, inner: Callable[[Any], Any]) -> Iterator[None]:
    """Report resized and copied storages, and put ``inner`` around hooks that are pushed."""
    resize, copy = torch.UntypedStorage.resize_, torch.Tensor.copy_
    contiguous, push = torch.Tensor.contiguous, torch._C._autograd._push_saved_tensors_default_hooks

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        result = resize(storage, nbytes)
        storages.resized(storage)
        return result

    def copy_(target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = copy(target, *args, **kwargs)
        storages.copied(args[0] if args else kwargs["src"], target)
        return result

    def made_contiguous(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = contiguous(tensor, **kwargs)
        storages.made_contiguous(tensor, result)
        return result

    def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> None:
        def unpack_inside(packed: Any) -> Any:  # packed before this block, if it is no holder
            return unpack(packed.value if isinstance(packed, _Holder) else packed)

        push(inner(pack), unpack_inside)

    journal = Journal()
    journal.set(torch.UntypedStorage, "resize_", resize_, owner="saved")
    journal.set(torch.Tensor, "copy_", copy_, owner="saved")
    journal.set(torch.Tensor, "contiguous", made_contiguous, owner="saved")
    journal.set(torch._C._autograd, "_push_saved_tensors_default_hooks", push_hooks, owner="saved")
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
