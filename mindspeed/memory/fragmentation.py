"""The use of the caching allocator that wastes least: a table for one recorded run.

Fragmentation arises where short-lived activations and long-lived states share segments, and where
sizes change from step to step. Two remedies of today's allocators, and what they do in the
simulation (:mod:`mindspeed.memory.caching_allocator`):

    expandable    segments are virtual addresses that grow, so no free block is too small to grow
    pools         model, gradient buffers and optimizer states have a pool of their own

Neither wins everywhere: pools with equal steps, expandable segments with varying lengths.

    trace = AllocationTrace(model.parameters())
    with trace:
        model(batch).backward()
    with trace, trace.long_lived():
        optimizer.step()
    peaks = CachingAllocator(Policy(expandable=True)).replay(trace.events)

The trace, of real tensors or FakeTensors, is a dispatch mode, which sees the results of every
operator. A storage is allocated when an operator first returns it and freed when its last tensor is
gone, as on a device; workspaces inside of operators are invisible.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.memory.caching_allocator import (
    AllocatorEvent,
    AllocatorPolicy,
    CachingAllocator,
    Peaks,
)


class AllocationTrace(TorchDispatchMode):
    """Appends to ``events`` while it is entered; frees also afterwards.

    Args:
        existing: tensors that were allocated before, in this order, and are long-lived.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.events: list[AllocatorEvent] = []
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
        self.events.append(AllocatorEvent(index, nbytes, self._long_lived))
        forget = functools.partial(self._forget, key)
        self._live[key] = index, weakref.ref(storage, forget)

    def _forget(self, key: int, _: Any) -> None:
        index, _ = self._live.pop(key)
        self.events.append(AllocatorEvent(index, 0))


POLICIES: Mapping[str, AllocatorPolicy] = {
    "off": AllocatorPolicy(),
    "pools": AllocatorPolicy(pools=True),
    "expandable": AllocatorPolicy(expandable=True),
}


def simulate(events: Sequence[AllocatorEvent]) -> dict[str, Peaks]:
    """Peaks of a trace under every policy, by the values of ``--memory-fragmentation``."""
    return {name: CachingAllocator(policy).replay(events) for name, policy in POLICIES.items()}


def best(peaks: Mapping[str, Peaks]) -> str:
    """The policy that reserves least; the first of equal ones."""
    return min(peaks, key=lambda name: peaks[name].reserved)


def table(peaks: Mapping[str, Peaks]) -> str:
    """A readable table with the best policy below."""
    lines = [f"{'policy':<12}{'allocated MiB':>15}{'reserved MiB':>15}{'fragmentation':>15}"]
    for name, peak in peaks.items():
        allocated, reserved = peak.allocated / 2**20, peak.reserved / 2**20
        lines.append(
            f"{name:<12}{allocated:>15,.1f}{reserved:>15,.1f}{100 * peak.fragmentation:>13.1f} %"
        )
    return "\n".join([*lines, f"least is reserved with --memory-fragmentation {best(peaks)}"])


class LongLivedPool:
    """Model, gradient buffers and optimizer states come from a pool of their own.

    The pool is in use from the construction of the first model chunk until the optimizer is built,
    and in the first step of the optimizer, which allocates its states. Allocations of autograd's
    threads on a device do not come from it.

    Args:
        pool: a context manager each time it is called (``device.memory_pool()``).
    """

    def __init__(self, pool: Callable[[], AbstractContextManager[None]]) -> None:
        self._pool = pool
        self._building = contextlib.ExitStack()
        self._begun = False

    def before_model(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Hook for the seam ``model_arguments``."""
        if not self._begun:
            self._begun = True
            self._building.enter_context(self._pool())
        return arguments

    def with_optimizer(self, optimizer: Any) -> Any:
        """Hook for the seam ``optimizer``."""
        self._building.close()
        return _around_steps(optimizer, lambda count: self._pool() if count == 1 else None)


class FragmentationReport:
    """Records the first two steps of training, and shows :func:`table` after them."""

    STEPS = 2

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._trace: AllocationTrace | None = None
        self._optimizer: Any = None
        self._done = False

    def with_optimizer(self, optimizer: Any) -> Any:
        """Hook for the seam ``optimizer``."""
        self._optimizer = optimizer
        return _around_steps(optimizer, self._step)

    def with_schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Hook for the seam ``schedule``: evaluation is not recorded."""

        @functools.wraps(function)
        def recorded(**options: Any) -> Any:
            if self._done or options.get("forward_only"):
                return function(**options)
            if self._trace is None:
                self._trace = AllocationTrace(_states(options["model"], self._optimizer))
            with self._trace:
                return function(**options)

        return recorded

    @contextlib.contextmanager
    def _step(self, count: int) -> Iterator[None]:
        if self._done or self._trace is None:
            yield
            return
        with self._trace, self._trace.long_lived() if count == 1 else contextlib.nullcontext():
            yield
        if count == self.STEPS:
            self._done = True
            self._show(table(simulate(self._trace.events)))
            self._trace = None


def _around_steps(
    optimizer: Any, around: Callable[[int], AbstractContextManager[None] | None]
) -> Any:
    """``optimizer`` with ``around(number of the step, from 1)`` around each step."""
    plain, count = optimizer.step, 0

    @functools.wraps(plain)
    def step(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        with around(count) or contextlib.nullcontext():
            return plain(*args, **options)

    optimizer.step = step
    return optimizer


def _states(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    """Weights, gradient buffers and main weights, which exist before the first step."""
    for chunk in model if isinstance(model, list) else [model]:
        for parameter in chunk.parameters():
            yield parameter.data
            if (gradient := getattr(parameter, "main_grad", None)) is not None:
                yield gradient
    for group in getattr(optimizer, "param_groups", ()):
        yield from (parameter.data for parameter in group["params"])
