"""An NVIDIA GPU: ``torch.cuda``, of which nothing is replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mindspeed.device.accelerator import Accelerator
from mindspeed.errors import ConfigError


class CudaDevice(Accelerator):
    """The current CUDA device of this process."""

    name = "cuda"
    backend = "nccl"
    _capabilities = frozenset(
        {
            "streams",
            "pinned_memory",
            "host_mapped_memory",
            "graphs",
            "triton",
            "fp64_collectives",
            "compile",
        }
    )

    def __init__(self) -> None:
        if not getattr(torch._C, "_cuda_getDeviceCount", int)():
            raise ConfigError(
                "MINDSPEED_DEVICE=cuda, but torch finds no CUDA device; "
                "install a CUDA build of torch and check nvidia-smi, or set MINDSPEED_DEVICE=cpu"
            )
        super().__init__(torch.cuda)

    def has(self, capability: str) -> bool:
        """See the base class; fp8 needs compute capability 8.9."""
        if capability == "fp8":
            return torch.cuda.get_device_capability() >= (8, 9)
        return super().has(capability)

    def allocator_setter(self) -> Callable[[str], None] | None:
        """See the base class; newer torch has one function for all devices."""
        setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        return setter or super().allocator_setter()

    def empty_host_mapped(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned host memory as a tensor ``[*shape]`` on the device.

        Pinned memory has the same address on host and device (unified virtual addressing).
        """
        size = math.prod(shape) * dtype.itemsize
        memory = _PinnedMemory(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        return torch.as_tensor(memory, device=self.torch_device()).view(dtype).view(*shape)


class _PinnedMemory:
    """Bytes of host memory, uint8 ``[n]``, described as memory of the device."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }
