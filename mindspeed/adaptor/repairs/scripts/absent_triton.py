"""Defect: Megatron modules import Triton unconditionally at module level.

Where: :data:`MODULES`; ``megatron.training`` imports the batch-invariant kernels, the mixer of
Mamba those of its inference. Both only define kernels at import time. What Megatron itself does
without (the kernel that appends to the KV cache) gets no stub: Megatron's plain way runs.
Symptom: without Triton no training script starts (``ModuleNotFoundError: triton``).
Fix: while one of these modules is being imported, and only then, ``import triton`` resolves to a
stub. Its ``jit`` returns an object that raises when launched, saying that Triton is not installed.
The stub is removed from ``sys.modules`` after the import.
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
)


def install(hooks: PostImportHooks) -> None:
    """Import :data:`MODULES` with the stub if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        for name in MODULES:
            hooks.around_import(name, stub_triton)


@contextmanager
def stub_triton() -> Iterator[None]:
    """``import triton`` resolves to the stub inside this block; blocks may nest."""
    if "triton" in sys.modules:
        yield
        return
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
