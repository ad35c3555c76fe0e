"""A segment: one call of a site whose saved tensors are dropped and computed again in backward.

The forward runs as always and builds its graph; only the tensors that autograd saves are replaced
by :class:`~mindspeed.memory.saved.RecomputedTensor`. When backward asks for the first of them, the
call runs once more on its inputs and every saved tensor is captured in the same order. There is no
nested backward: parameters get their gradients once, from the graph of the forward, so keyword
arguments, several outputs, frozen inputs and ``torch.autograd.grad`` work.

The second run stops at the last tensor that is still needed: collectives after it do not run.
Its inputs are saved through autograd, in the surrounding site, so they may be in host memory or be
computed again themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed.memory.saved import Held, RecomputedTensor

Environment = Callable[[], Callable[[], AbstractContextManager[object]]]
"""Called in forward: remembers what a second run must find (random states). What it returns makes
a context with that state, which restores the present one when it ends."""


class RecomputationError(RuntimeError):
    """The second run saved other tensors than the first."""


class Segment:
    """One call of a site.

    Args:
        name: Layer and site, for messages.
        forward: What to call.
        args: Its arguments; tensors in nested containers are found.
        kwargs: Its keyword arguments.
        environment: What the second run must find as the first did.
        on_rerun: Called before every second run.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        environment: Environment,
        on_rerun: Callable[[], None],
    ) -> None:
        self.name = name
        self._forward, self._on_rerun = forward, on_rerun
        leaves, self._structure = tree_flatten((args, kwargs))
        inputs = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self._leaves = [None if i in inputs else leaf for i, leaf in enumerate(leaves)]
        self._requires_grad = {i: tensor.requires_grad for i, tensor in inputs.items()}
        self._inputs = Held(*inputs.values())
        self._enter = environment()
        self._saved: list[weakref.ref[RecomputedTensor]] = []
        self._outputs: dict[int, weakref.ref[RecomputedTensor]] = {}

    def save(self, tensor: torch.Tensor) -> RecomputedTensor:
        """Stand for a tensor that the call saves."""
        saved = RecomputedTensor(tensor, self.materialize)
        self._saved.append(weakref.ref(saved))
        return saved

    def save_output(self, number: int, tensor: torch.Tensor) -> RecomputedTensor:
        """Stand for output ``number`` of the call."""
        known = self._outputs.get(number)
        saved = known() if known is not None else None
        if saved is None:
            saved = RecomputedTensor(tensor, self.materialize)
            self._outputs[number] = weakref.ref(saved)
        return saved

    @property
    def needed(self) -> bool:
        """Whether backward still needs one of its tensors."""
        return bool(self._live())

    def materialize(self) -> None:
        """Run the call again unless all tensors that are needed are there."""
        needed = self._live()
        if any(saved.value is None for saved in needed):
            self._run()

    def discard(self) -> None:
        """Drop the tensors that were computed again; backward computes them when it asks."""
        for saved in self._live():
            saved.value = None

    def _live(self) -> list[RecomputedTensor]:
        references = [*self._saved, *self._outputs.values()]
        return [saved for saved in (reference() for reference in references) if saved is not None]

    def _run(self) -> None:
        self._on_rerun()
        leaves = list(self._leaves)
        tensors = self._inputs.get()
        for (i, requires_grad), tensor in zip(self._requires_grad.items(), tensors, strict=True):
            leaves[i] = tensor.detach().requires_grad_(requires_grad)
        args, kwargs = tree_unflatten(leaves, self._structure)
        capture = _Capture(
            self.name, self._saved, stop=not any(r() for r in self._outputs.values())
        )
        hooks = torch.autograd.graph.saved_tensors_hooks(capture, lambda tensor: tensor)
        try:
            with self._enter(), torch.enable_grad(), hooks:
                outputs = tree_flatten(self._forward(*args, **kwargs))[0]
        except _Stop:
            return
        capture.check_complete()
        for number, reference in self._outputs.items():
            if (saved := reference()) is not None:
                saved.value = outputs[number].detach()


class _Stop(Exception):
    """Everything that backward needs has been computed again."""


class _Capture:
    """The pack hook of a second run: gives the saved tensors their values, in order.

    Args:
        name: Layer and site, for messages.
        saved: Stands for the tensors that the first run saved.
        stop: Raise :class:`_Stop` at the last that is needed.

    Attributes:
        second_run: Tells :mod:`mindspeed.instruments.saved` that the values wait for a backward.
    """

    second_run = True

    def __init__(
        self, name: str, saved: list[weakref.ref[RecomputedTensor]], *, stop: bool
    ) -> None:
        live = [i for i, reference in enumerate(saved) if reference() is not None]
        self._name, self._saved, self._count = name, saved, 0
        self._last = live[-1] if stop and live else None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        number, value = self._count, tensor.detach()
        self._count += 1
        if number >= len(self._saved):
            raise self._error(f"more than the {len(self._saved)} tensors")
        saved = self._saved[number]()
        if saved is not None:
            if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
                raise self._error(
                    f"as number {number} a tensor {tuple(tensor.shape)} of {tensor.dtype} where "
                    f"{tuple(saved.shape)} of {saved.dtype}"
                )
            saved.value = value
        if number == self._last:
            raise _Stop
        return value

    def check_complete(self) -> None:
        """Refuse a second run that saved fewer tensors than the first."""
        if self._count < len(self._saved):
            raise self._error(f"only {self._count} of the {len(self._saved)} tensors")

    def _error(self, difference: str) -> RecomputationError:
        return RecomputationError(
            f"{self._name}: computed again, it saved {difference} that its forward had saved; what "
            "it computes must depend on its arguments alone"
        )
