"""What autograd holds instead of a saved tensor: the tensor itself, or how to get it back.

Every class has ``get()``, which returns the value when backward asks for it. A value belongs to the
object that autograd holds, so it is freed when autograd releases the saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.spmd import Passes, typed


class InPlaceChange(RuntimeError):
    """A tensor that backward needs was changed in place after it was saved."""

    def __init__(self, site: str, tensor: torch.Tensor) -> None:
        super().__init__(
            f"{site}: a saved tensor of shape {tuple(tensor.shape)} was changed in place before "
            "backward used it; change a copy instead"
        )


class Kept:
    """The tensor itself.

    Saved-tensor hooks switch autograd's own check of in-place changes off, so the check is here.
    """

    __slots__ = ("__weakref__", "_site", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, site: str) -> None:
        # A saved output would own the graph node that saves it: a cycle. A detached tensor shares
        # storage and version. A leaf has no such node and keeps its attributes.
        self._tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self._version, self._site = tensor._version, site

    def problem(self) -> InPlaceChange | None:
        """Reason why the tensor cannot be used, if any."""
        changed = self._tensor._version != self._version
        return InPlaceChange(self._site, self._tensor) if changed else None

    def get(self) -> torch.Tensor:
        """The tensor."""
        if (problem := self.problem()) is not None:
            raise problem
        return self._tensor


class RecomputedTensor:
    """A tensor that a segment computes again."""

    __slots__ = ("__weakref__", "_compute", "dtype", "shape", "value")

    def __init__(self, tensor: torch.Tensor, compute: Callable[[], None]) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.value: torch.Tensor | None = None
        self._compute = compute

    def get(self) -> torch.Tensor:
        """The tensor, as it was when it was saved."""
        if self.value is None:
            self._compute()
        assert self.value is not None
        return self.value


class ViewOf:
    """A view of an output that a segment computes again.

    Args:
        view: The tensor that was saved: a view of the output's storage, of the same dtype.
    """

    __slots__ = ("__weakref__", "_geometry", "_output")

    def __init__(self, output: RecomputedTensor, view: torch.Tensor) -> None:
        self._output = output
        self._geometry = view.size(), view.stride(), view.storage_offset()

    def get(self) -> torch.Tensor:
        """The view, as it was when it was saved."""
        return self._output.get().as_strided(*self._geometry)


class Held:
    """Tensors that are saved for backward apart from the layers of a model.

    They are saved through autograd, so what drops, moves or restores saved tensors does it to
    these, too; but no backward releases them: they live as long as this object.
    """

    __slots__ = ("_node",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        # Without the graphs that made them, which may hold this object. Leaves keep attributes.
        own = [tensor if tensor.is_leaf else tensor.detach() for tensor in tensors]
        with torch.enable_grad():
            self._node = _Hold.apply(torch.empty(0, requires_grad=True), *own)

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors; hooks bring back now what they have dropped."""
        return self._node.grad_fn.saved_tensors  # type: ignore[no-any-return]


@typed(Passes())
class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return dummy.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pragma: no cover
        raise AssertionError("the graph of a model does not contain tensors that are only held")
