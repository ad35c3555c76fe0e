"""What autograd holds instead of a saved tensor: the tensor itself, or how to get it back.

Every class has ``get()``, which returns the value when backward asks for it. A value belongs to the
object that autograd holds, so it is freed when autograd releases the saved tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


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


class Recomputed:
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

    def __init__(self, output: Recomputed, view: torch.Tensor) -> None:
        self._output = output
        self._geometry = view.size(), view.stride(), view.storage_offset()

    def get(self) -> torch.Tensor:
        """The view, as it was when it was saved."""
        return self._output.get().as_strided(*self._geometry)
