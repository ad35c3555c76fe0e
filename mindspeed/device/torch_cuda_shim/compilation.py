"""Megatron's autocast and torch.compile, mapped to the CPU.

``torch.autocast("cuda")``, the ``custom_fwd`` / ``custom_bwd`` pair and the autocast queries apply
to the CPU when Megatron calls them. ``torch.compile`` returns Megatron's small fused functions
unchanged: compiling dozens of them for a CPU costs more than it saves, and importing the compiler
alone takes seconds. Other libraries keep their autocast and their compiler.
``MINDSPEED_COMPILE=1`` keeps Megatron's too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp import autocast_mode

from mindspeed.device.torch_cuda_shim.callers import called_by_megatron
from mindspeed.journal import Journal


def _by_megatron(depth: int = 2) -> bool:
    return called_by_megatron(sys._getframe(depth).f_globals)


def compile_eagerly(
    original: Callable[..., Any], prepare: Callable[[], None] = lambda: None
) -> Callable[..., Any]:
    """``torch.compile`` that hands Megatron its function back.

    Args:
        original: ``torch.compile``.
        prepare: called before something is really compiled.
    """

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if not _by_megatron() or os.environ.get("MINDSPEED_COMPILE") == "1":
            prepare()
            return original(model, **kwargs)
        return (lambda function: function) if model is None else model

    return compile


def _autocast_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and _by_megatron():
            device_type = "cpu"
        original(self, device_type, *args, **kwargs)

    return __init__


def _custom(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def custom(function: Any = None, *, device_type: str = "cuda", **kwargs: Any) -> Any:
        if device_type == "cuda" and _by_megatron():
            device_type = "cpu"
        return original(function, device_type=device_type, **kwargs)

    return custom


def _query(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def query(device_type: str = "cuda") -> Any:
        if device_type == "cuda" and _by_megatron():
            device_type = "cpu"
        return original(device_type)

    return query


def _traceable(journal: Journal, factories: Sequence[Callable[..., Any]]) -> Callable[[], None]:
    """A function that makes the compiler take the wrapped factories as single operators.

    It imports the compiler, so it waits until somebody compiles.
    """

    @functools.cache
    def register() -> None:
        import torch._dynamo as dynamo

        for factory in factories:
            dynamo.allow_in_graph(factory)
            journal.call_on_undo(functools.partial(dynamo.disallow_in_graph, factory))

    return register


def install(journal: Journal, factories: Sequence[Callable[..., Any]] = ()) -> None:
    """Let autocast and compilation do on the CPU what Megatron means by them.

    Args:
        factories: wrapped torch functions that other libraries' compiled code may call.
    """

    def put(holder: Any, name: str, value: Any) -> None:
        journal.set(holder, name, value, owner="device")

    put(autocast_mode.autocast, "__init__", _autocast_init(autocast_mode.autocast.__init__))
    for name in ("custom_fwd", "custom_bwd"):
        value = _custom(getattr(torch.amp, name))
        for holder in (torch.amp, autocast_mode, torch.cuda.amp):
            put(holder, name, value)
    dtype = _query(torch.get_autocast_dtype)
    put(torch, "get_autocast_dtype", dtype)
    put(torch, "get_autocast_gpu_dtype", _query(torch.get_autocast_dtype))
    put(torch, "is_autocast_enabled", _query(torch.is_autocast_enabled))
    put(torch, "compile", compile_eagerly(torch.compile, _traceable(journal, factories)))
