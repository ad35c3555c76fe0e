"""Weight gradients that a backward leaves out, until the action W asks for them.

    store = WeightGradients()
    with store.splitting():                     # linear layers hide their weights from autograd
        out = model(x)
        with store.deferred((stage, 3)):        # the action I
            out.backward(g)
        store.compute((stage, 3))               # the action W

While a plan with I runs, a linear layer hides its weight from autograd and gives the store the
computation of dW with what it needs: its input and the gradient of its output. The computation adds
to ``main_grad`` (``grad`` without data parallelism) itself, so no hook of the parameter runs; who
executes the plan starts the reduction of the gradients after the last W. In a whole backward (the
action B) the computation runs at once.

The sums are those of an undivided backward, bit for bit, where the W of a stage run in the order
of their micro-batches.

Between I and W what a computation needs may wait in host memory: O copies it out on a stream of its
own, L back (:class:`mindspeed.memory.stash_swap.StashSwap`). Storages that others hold, too, stay:
a copy would free nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

Key = tuple[int, int]
"""Stage and micro-batch."""


class Swap(Protocol):
    """Copies to the host and back; :class:`mindspeed.memory.stash_swap.StashSwap`."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is worth a copy."""
        ...

    def out(self, key: Key, tensor: torch.Tensor) -> Any:
        """Start to copy a tensor; ``get()`` of the result has it again."""
        ...

    def back(self, key: Key) -> int:
        """Start to copy the tensors of a key back; returns their bytes."""
        ...

    def forget(self, key: Key) -> int:
        """The tensors of a key are about to be used up; returns the bytes that came back."""
        ...

    def poll(self) -> None:
        """Free the tensors on the device whose copies are complete; never waits."""
        ...


class _Pending(NamedTuple):
    """The computation of one weight gradient.

    Attributes:
        run: adds the gradient; gets the tensors.
        stash: the tensors, or their host copies.
    """

    run: Callable[..., None]
    stash: list[Any]


class WeightGradients:
    """The store; the model chunks of a rank share one.

    Args:
        swap: copies to the host and back; without it, O and L do nothing.

    Attributes:
        bytes: of device memory that pending computations keep; a storage counts once, a copy that
            is under way counts as done.
        peak_bytes: most of them so far.
        computed: deferred computations that have run.
    """

    def __init__(self, swap: Swap | None = None) -> None:
        self.swap = swap or _NoSwap()
        self.bytes = self.peak_bytes = self.computed = 0
        self._splitting = False
        self._key: Key | None = None
        self._pending: dict[Key, list[_Pending]] = {}
        self._references: Counter[int] = Counter()

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """Around the execution of a plan with I: its forwards, backwards and W."""
        self._splitting = True
        try:
            yield
        finally:
            self._splitting = False
            for key in self._pending:  # of a step that failed
                self.swap.forget(key)
            self._pending.clear()
            self._references.clear()
            self.bytes = 0

    @contextlib.contextmanager
    def deferred(self, key: Key) -> Iterator[None]:
        """A backward without weight gradients; :meth:`compute` of the same key has them.

        Raises:
            ValueError: there was a backward of this key, and its W has not run.
        """
        if key in self._pending:
            raise ValueError(f"stage {key[0]}, micro-batch {key[1]}: the W of its I has not run")
        self._pending[key] = []
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @property
    def pending(self) -> tuple[Key, ...]:
        """Stages and micro-batches whose W has not run, in the order of their I."""
        return tuple(self._pending)

    @property
    def splitting_backward(self) -> bool:
        """Whether a plan with I runs: layers hide their weights from autograd."""
        return self._splitting

    @property
    def deferring(self) -> bool:
        """Whether :meth:`put` keeps its computation for later."""
        return self._key is not None

    def takes(self, x: torch.Tensor, weights: Iterable[torch.Tensor]) -> bool:
        """Whether a layer is to hide its weights from autograd and to call :meth:`put` in backward.

        Args:
            x: input of the layer. If it needs no gradient, autograd would not call the
                backward of a layer that hides its weights.
            weights: of the layer; frozen ones get no gradient.
        """
        return (
            self._splitting
            and torch.is_grad_enabled()
            and x.requires_grad
            and any(weight.requires_grad for weight in weights)
        )

    def put(
        self,
        run: Callable[..., None],
        *tensors: torch.Tensor,
        delay: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Compute a weight gradient: now, or in the W of the backward that is running.

        Args:
            run: computes it.
            *tensors: its arguments.
            delay: takes what would be computed now, for the part of a layer that hides the
                dispatch of gradients.
        """
        if self._key is None and delay is not None:
            delay(partial(run, *tensors))
            return
        if self._key is None:
            with torch.no_grad():
                run(*tensors)
            return
        self.swap.poll()
        # Tensors of our own: how many others refer to a storage is then known.
        stash = [tensor.detach() for tensor in tensors]
        self._pending[self._key].append(_Pending(run, stash))
        for tensor in stash:
            self._hold(tensor)

    def compute(self, key: Key) -> None:
        """Compute the weight gradients that the I of a stage and micro-batch left out.

        Raises:
            KeyError: there was no such I.
        """
        self.swap.poll()
        computations = self._pending.pop(key)[::-1]
        self.bytes -= self.swap.forget(key)
        with torch.no_grad():
            while computations:
                run, stash = computations.pop()
                for entry in stash:
                    self._let_go(entry)
                run(*map(_on_device, stash))
                self.computed += 1

    def offload(self, key: Key) -> None:
        """Start to copy what the W of a stage and micro-batch needs to the host."""
        stashes = [stash for _, stash in self._pending[key]]
        freed = self._freed_by_copies([tensor for stash in stashes for tensor in stash])
        for stash in stashes:
            for i, tensor in enumerate(stash):
                if _address(tensor) in freed:
                    stash[i] = self.swap.out(key, tensor)
                    self._let_go(tensor)
        self.swap.poll()

    def load(self, key: Key) -> None:
        """Start to copy back what the W of a stage and micro-batch needs."""
        self.swap.poll()
        self._add(self.swap.back(key))

    def _freed_by_copies(self, tensors: list[torch.Tensor]) -> set[int]:
        """The storages that nobody but ``tensors`` needs, and all of these can be copied."""
        mine = Counter(map(_address, tensors))
        stay = {_address(tensor) for tensor in tensors if not self.swap.takes(tensor)}
        found = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            uses = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
            if uses == mine[storage._cdata] + 1:  # ``storage`` is one use
                found.add(storage._cdata)
        return found - stay

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._references[storage._cdata] += 1
        if self._references[storage._cdata] == 1:
            self._add(storage.nbytes())

    def _let_go(self, entry: Any) -> None:
        if not isinstance(entry, torch.Tensor):
            return
        storage = entry.untyped_storage()
        self._references[storage._cdata] -= 1
        if not self._references[storage._cdata]:
            del self._references[storage._cdata]
            self.bytes -= storage.nbytes()

    def _add(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)


class _NoSwap:
    """Everything stays on the device."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return False

    def out(self, key: Key, tensor: torch.Tensor) -> Any:
        return tensor

    def back(self, key: Key) -> int:
        return 0

    def forget(self, key: Key) -> int:
        return 0

    def poll(self) -> None:
        return


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_device(entry: Any) -> torch.Tensor:
    return entry if isinstance(entry, torch.Tensor) else entry.get()
