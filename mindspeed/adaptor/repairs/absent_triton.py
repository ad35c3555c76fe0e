"""Some Megatron modules import Triton at their top, so without it no training script starts.

``megatron.training`` imports the batch-invariant kernels, inference imports its cache kernels; both
only define them. While one of these modules is executed, and only then, ``import triton`` finds a
stand-in whose ``jit`` turns a kernel into an object that says, when launched, that Triton is not
installed. Nobody else ever sees the stand-in.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from mindspeed.adaptor.importing import PostImportHooks

MODULES = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
)


def install(hooks: PostImportHooks) -> None:
    """Show the stand-in to :data:`MODULES` where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        for name in MODULES:
            hooks.around_import(name, stand_in)


@contextmanager
def stand_in() -> Iterator[None]:
    """``import triton`` works inside this block."""
    triton, language = ModuleType("triton"), _Language("triton.language")
    triton.jit = triton.autotune = triton.heuristics = _decorator  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    added = {"triton": triton, "triton.language": language}
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


class _Language(ModuleType):
    """``triton.language``: names are only used in annotations and in kernels that never run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object()


class _Kernel:
    """A kernel that cannot be launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"kernel {self.name} needs Triton, which is not installed")


def _decorator(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``@triton.jit`` and ``@triton.jit(...)``."""
    return _Kernel if function is None or not callable(function) else _Kernel(function)
