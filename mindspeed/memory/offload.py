"""Saved tensors in host memory: copied out when they are saved, back before backward needs them."""

from __future__ import annotations

import torch

from mindspeed.memory.figures import SiteFigures


class HostCopy:
    """A copy in host memory; it comes back once, for all who saved the same tensor.

    Args:
        tensor: Any shape and dtype, no overlapping elements.
        figures: Of the site that saved it.
    """

    def __init__(self, tensor: torch.Tensor, figures: SiteFigures) -> None:
        self._geometry = tensor.size(), tensor.stride()
        self._device, self._figures = tensor.device, figures
        self._host = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
        self._host.copy_(tensor.detach())
        self._restored: torch.Tensor | None = None
        self.nbytes = self._host.nbytes
        figures.host += self.nbytes
        figures.copied_out += self.nbytes

    def get(self) -> torch.Tensor:
        """The tensor on its device, any shape and dtype, with its strides."""
        if self._restored is None:
            restored = torch.empty_strided(
                *self._geometry, dtype=self._host.dtype, device=self._device
            )
            self._restored = restored.copy_(self._host)
            self._figures.copied_in += self.nbytes
        return self._restored


class OnHost:
    """What autograd holds instead of a tensor in host memory."""

    __slots__ = ("__weakref__", "copy")

    def __init__(self, copy: HostCopy) -> None:
        self.copy = copy

    def get(self) -> torch.Tensor:
        """The tensor on its device, any shape and dtype, as it was when it was saved."""
        return self.copy.get()


def can_offload(tensor: torch.Tensor, min_bytes: int) -> bool:
    """Whether a copy in host memory frees memory.

    Args:
        tensor: Any shape and dtype. Leaves exist anyway, and so do tensors without a gradient
            history (masks, tables); an expanded tensor repeats elements.
        min_bytes: A smaller one is not worth it.
    """
    return (
        tensor.grad_fn is not None
        and tensor.nbytes >= min_bytes
        and all(
            stride or size == 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
    )
