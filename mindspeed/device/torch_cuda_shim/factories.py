"""``device="cuda"`` in a call means this process's device, the CPU.

Wraps the functions and methods that take a device: tensor factories, ``Tensor.to``, what reads the
arguments of ``Module.to``, ``torch.load`` and friends. Only spellings of CUDA change (``"cuda"``,
``"cuda:1"``, ``torch.device("cuda", 1)``, a device index); every other device, ``meta`` included,
passes through, and so does everything once the layer is uninstalled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindspeed.device.torch_cuda_shim import rng
from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal

CPU = torch.device("cpu")

_LIKE = [
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
]
_NEW = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"]


def on_host(device: Any) -> Any:
    """``device`` itself, or the CPU when it is a spelling of CUDA."""
    if isinstance(device, str):
        return CPU if device.partition(":")[0] == "cuda" else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def _with_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` whose ``device`` and ``pin_memory`` keywords mean something on the CPU."""

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return factory


def _constructors() -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, function) of every torch function that creates a tensor on a device."""
    from torch.utils._device import _device_constructors

    # Filled before anything is wrapped: `with torch.device(...)` looks the C functions up in it.
    constructors = _device_constructors()
    for holder in (torch, torch.fft, torch.nested):
        for name, value in list(vars(holder).items()):
            if getattr(value, "__hash__", None) and callable(value) and value in constructors:
                yield holder, name, value
    for name in _LIKE:
        yield torch, name, getattr(torch, name)


def _keep_scriptable(
    journal: Journal, function: Callable[..., Any], wrapped: Callable[..., Any]
) -> None:
    """Let ``torch.jit.script`` know ``wrapped`` as the operator that ``function`` is.

    The table is keyed by identity; ``wrapped`` lives as long as its entry, in the journal.
    """
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    operator = table.get(id(function))
    if operator is not None:
        table[id(wrapped)] = operator
        journal.call_on_undo(lambda: table.pop(id(wrapped), None))


def _move(method: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to``; asked by Megatron, a move to the host is a copy, as it is from a GPU."""

    @functools.wraps(method)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (str, int, torch.device)):
            target = args[0]
            args = (on_host(target), *args[1:])
        elif "device" in kwargs:
            target = kwargs["device"]
            kwargs["device"] = on_host(target)
        else:
            return method(self, *args, **kwargs)
        moved = method(self, *args, **kwargs)
        if moved is self and _is_host(target) and called_by_megatron(sys._getframe(1).f_globals):
            return self.clone()
        return moved

    return to


def _is_host(device: Any) -> bool:
    return (device.type if isinstance(device, torch.device) else device) == "cpu"


def _parse_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """What reads the arguments of ``to`` for modules, packed sequences and tensordict."""

    @functools.wraps(function)
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_host(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_host(kwargs["device"])
        return function(*args, **kwargs)

    return parse_to


def _load(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load``; Megatron may read a file that was written on a GPU."""

    @functools.wraps(function)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None and called_by_megatron(sys._getframe(1).f_globals):
            map_location = CPU
        return function(f, on_host(map_location), *args, **kwargs)

    return load


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, rng._HostGenerator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, rng._HostGenerator)


class Generator(torch.Generator, metaclass=_GeneratorType):
    """``torch.Generator`` that accepts ``device="cuda"``."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if on_host(device) is device:
            return rng._HostGenerator(device)
        return rng.DeviceGenerator()


def _device_context(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def __init__(self: Any, device: Any) -> None:
        method(self, on_host(device))

    return __init__


def install(journal: Journal) -> list[Callable[..., Any]]:
    """Make the device arguments of torch accept CUDA; return the wrapped factories."""
    from torch.utils._device import DeviceContext

    def wrap(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        journal.set(holder, name, wrapper(getattr(holder, name)), owner="device")

    factories = []
    for holder, name, function in list(_constructors()):
        wrapped = _with_device(function)
        _keep_scriptable(journal, function, wrapped)
        journal.set(holder, name, wrapped, owner="device")
        factories.append(wrapped)
    for name in _NEW:
        wrap(torch.Tensor, name, _with_device)
    wrap(torch.Tensor, "to", _move)
    wrap(torch._C._nn, "_parse_to", _parse_to)
    wrap(torch, "load", _load)
    wrap(torch.serialization, "load", _load)
    wrap(DeviceContext, "__init__", _device_context)
    journal.set(torch, "Generator", Generator, owner="device")
    return factories
