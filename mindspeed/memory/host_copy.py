"""A saved tensor in host memory: copied out when it is saved, back before backward needs it.

    compute   ... forward ....|wait|........... backward ...|wait arrived| use ...
    out            |wait compute|copy|written
    back                                 |wait compute|copy|arrived

The host never waits. What keeps memory from being written too early:

* The tensor on the device is held until the host has seen ``written`` complete, so the caching
  allocator cannot give its memory to someone else while the copy reads it. Only then may the copy
  back start; before, the tensor is still there.
* A block of host memory that is used again may still be read by the copy to the device before: the
  stream ``out`` waits for that copy's event.
* The restored tensor is allocated on the compute stream, from memory that earlier kernels of this
  stream may still use: the stream ``back`` waits for them. It is freed to the compute stream,
  which has waited for ``arrived`` before. One that nobody used is freed after the stream has
  waited, too; one that is used on another stream is recorded there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mindspeed.device import Device
from mindspeed.memory.figures import SiteFigures
from mindspeed.memory.host_pool import HostPool
from mindspeed.memory.saved import InPlaceChange, Kept


class Streams:
    """The streams of copies in both directions, made when they are first needed."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._made: tuple[Any, Any] | None = None

    @property
    def out(self) -> Any:
        """Stream of copies from the device to the host."""
        return self._streams()[0]

    @property
    def back(self) -> Any:
        """Stream of copies from the host to the device."""
        return self._streams()[1]

    def _streams(self) -> tuple[Any, Any]:
        if self._made is None:
            self._made = self.device.stream(), self.device.stream()
        return self._made

    def recorded(self, stream: Any) -> Any:
        """A new event after the present work of a stream."""
        event = self.device.event()
        event.record(stream)
        return event


class OffloadedCopy:
    """Elements in host memory; they come back once, for all who saved a view of them.

    Args:
        tensor: Any shape and dtype, as :func:`can_offload` allows. A slice of a larger tensor is
            copied without the gaps, and gets them again: the order in which a product sums may
            depend on strides.
        where: Layer and site, for messages.
        streams: Of copies.
        pool: Of host memory.
        figures: Of the site that saved the tensor.
        on_get: Called before the tensor is needed, if it has not been called before.
        on_death: Called when nobody needs the copy any more.

    Attributes:
        nbytes: Bytes of the elements.
        written: Event after the copy to the host.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        where: str,
        streams: Streams,
        pool: HostPool,
        figures: SiteFigures,
        on_get: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self.nbytes = tensor.nbytes
        self._streams, self._figures = streams, figures
        self._on_get, self._on_death = on_get, on_death
        self._source: Kept | None = Kept(tensor, where)
        self._problem: InPlaceChange | None = None
        self._stays = False
        self._restored: torch.Tensor | None = None
        self._home: Any = None  # the stream on which it was allocated
        self._arrived: Any = None
        self._waited = False
        self._device = tensor.device
        self._block = pool.take(tensor.nbytes)
        host, dense = self._block.memory.view(tensor.dtype), dense_strides(tensor)
        target = host.as_strided(tensor.size(), dense)
        gaps = tensor.stride() != dense
        self._host = target if gaps else host
        self._size, self._strides = self._host.size(), tensor.stride() if gaps else host.stride()
        out = streams.out
        out.wait_stream(streams.device.current_stream())
        if self._block.read is not None:
            out.wait_event(self._block.read)
        with streams.device.use_stream(out):
            target.copy_(tensor.detach(), non_blocking=True)
        self.written = streams.recorded(out)
        figures.host += self.nbytes
        figures.copied_out += self.nbytes

    def release(self) -> None:
        """Let go of the tensor on the device; its copy is complete.

        An in-place change that came before may have reached the copy.
        """
        if self._source is not None and not self._stays:
            self._problem = self._source.problem()
            self._source = None

    @property
    def waits(self) -> bool:
        """Whether the tensor is in host memory only, and not on its way back."""
        return self._restored is None and not self._stays

    def start(self) -> None:
        """Begin to bring the tensor back. One whose copy is not complete is still there."""
        if not self.waits:
            return
        if self._source is not None:
            self._stays = True
            return
        device, back = self._streams.device, self._streams.back
        self._home = device.current_stream()
        self._restored = torch.empty_strided(
            self._size, self._strides, dtype=self._host.dtype, device=self._device
        )
        back.wait_stream(self._home)
        with device.use_stream(back):
            self._restored.copy_(self._host, non_blocking=True)
        self._arrived = self._block.read = self._streams.recorded(back)
        self._figures.copied_in += self.nbytes

    def get(self, size: torch.Size, strides: tuple[int, ...]) -> torch.Tensor:
        """The elements on their device, as they were when they were saved.

        Raises:
            InPlaceChange: They were changed before their copy was complete.
        """
        self._on_get()
        self.start()
        if self._source is not None:
            source = self._source.get()
            if source.stride() != dense_strides(source):
                return source
            return source.as_strided(size, strides, source.storage_offset())
        if self._problem is not None:
            raise self._problem
        assert self._restored is not None
        stream = self._streams.device.current_stream()
        stream.wait_event(self._arrived)
        self._waited = True
        if stream != self._home:
            self._home.wait_event(self._arrived)
            self._restored.record_stream(stream)
        return self._restored.as_strided(size, strides)

    def __del__(self) -> None:
        if self._arrived is not None and not self._waited:
            self._home.wait_event(self._arrived)
        self._on_death()


class OnHost:
    """Placeholder that autograd saves for a tensor in host memory."""

    __slots__ = ("__weakref__", "_size", "_strides", "copy")

    def __init__(self, copy: OffloadedCopy, tensor: torch.Tensor) -> None:
        self.copy = copy
        self._size, self._strides = tensor.size(), tensor.stride()

    def get(self) -> torch.Tensor:
        """The tensor on its device, as it was when it was saved."""
        return self.copy.get(self._size, self._strides)


def elements_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors of one storage that have the same elements.

    Tensors without gaps have if they begin at the same place and are as long: reshaped, transposed.
    """
    key = tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version
    dense = tensor.stride() == dense_strides(tensor)
    return key if dense else (*key, tensor.size(), tensor.stride())


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in the same order without gaps."""
    return torch.empty_like(tensor, device="meta").stride()


def can_offload(tensor: torch.Tensor, min_bytes: int, device: str) -> bool:
    """Whether a copy in host memory frees memory of the device that only autograd needs.

    Args:
        tensor: Any shape and dtype. Leaves exist anyway, and so do tensors without a gradient
            history (masks, tables).
        min_bytes: A smaller one is not worth it.
        device: Type of the device.
    """
    return tensor.grad_fn is not None and can_copy(tensor, min_bytes, device)


def can_copy(tensor: torch.Tensor, min_bytes: int, device: str) -> bool:
    """Whether a :class:`OffloadedCopy` of a tensor is possible and worth it.

    Args:
        tensor: Any shape and dtype. An expanded tensor repeats elements; a subclass holds tensors
            of its own.
        min_bytes: A smaller one is not worth it.
        device: Type of the device.
    """
    return (
        tensor.nbytes >= max(min_bytes, 1)
        and tensor.device.type == device
        and not is_traceable_wrapper_subclass(tensor)
        and all(
            stride or size == 1 for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
    )
