"""``is_cuda``, ``type()`` and the like of tensors, and the tensor types of ``torch.cuda``.

Megatron compares ``parameter.type()`` with ``"torch.cuda.HalfTensor"`` and asserts ``is_cuda``; it
gets the results of a GPU, other callers those of the CPU. ``Tensor.cpu()`` called by Megatron
copies, because checkpoint staging and buffer offload then change or free the "device" tensor.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal

_DTYPES = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "DoubleTensor": torch.float64,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _CudaTensorType(type):
    """A class like ``torch.cuda.FloatTensor``: creates tensors, recognises them for Megatron."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype == cls.dtype
            and called_by_megatron(sys._getframe(1).f_globals)
        )

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype)
        return torch.empty(*args, dtype=cls.dtype)


def _type(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        elif isinstance(dtype, _CudaTensorType):
            dtype = dtype.dtype
        if dtype is not None:
            return method(self, dtype, *args, **kwargs)
        name = method(self)
        if called_by_megatron(sys._getframe(1).f_globals) and self.device.type == "cpu":
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_


def _is_cuda(self: torch.Tensor) -> bool:
    return called_by_megatron(sys._getframe(1).f_globals) and self.device.type == "cpu"


def _get_device(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def get_device(self: torch.Tensor) -> int:
        if called_by_megatron(sys._getframe(1).f_globals) and self.device.type == "cpu":
            return torch.cuda.current_device()
        return method(self)

    return get_device


def _cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = method(self, *args, **kwargs)
        if moved is self and called_by_megatron(sys._getframe(1).f_globals):
            return self.clone()
        return moved

    return cpu


def _cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return self if self.device.type == "cpu" else self.to(torch.device("cpu"))


def _pinned(self: Any, *_: Any, **__: Any) -> Any:
    """Host memory is as close to this device as memory can be."""
    return self


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Host memory is never reused while a tensor holds it."""


def install(journal: Journal) -> None:
    """Let tensors answer Megatron as device tensors."""

    def put(holder: Any, name: str, value: Any) -> None:
        journal.set(holder, name, value, owner="device")

    put(torch.Tensor, "type", _type(torch.Tensor.type))
    put(torch.Tensor, "cpu", _cpu(torch.Tensor.cpu))
    put(torch.Tensor, "get_device", _get_device(torch.Tensor.get_device))
    put(torch.Tensor, "is_cuda", property(_is_cuda))
    put(torch.Tensor, "record_stream", _record_stream)
    put(torch.Tensor, "cuda", _cuda)
    for holder in (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage):
        put(holder, "pin_memory", _pinned)
    for storage in (torch.UntypedStorage, torch.storage.TypedStorage):
        put(storage, "cuda", lambda self, *_, **__: self)
    for name, dtype in _DTYPES.items():
        body = {"dtype": dtype, "__module__": "torch.cuda"}
        put(torch.cuda, name, _CudaTensorType(name, (), body))
