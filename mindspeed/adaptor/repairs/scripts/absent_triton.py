"""Defect: Megatron modules import Triton unconditionally at module level.

Where: ``megatron.training`` imports the batch-invariant kernels, the mixer of Mamba those of its
inference, and since 0.18 ``megatron.core`` those of the paged stash. All only define kernels at
import time.
Symptom: without Triton no training script starts (``ModuleNotFoundError: triton``).
Fix: while such a module is being imported, and only then, ``import triton`` resolves to a stub. Its
``jit`` returns an object that raises when launched, saying that Triton is not installed. The stub
is removed from ``sys.modules`` after the import. Where an import is guarded by ``try``, that of
Triton or of a module that insists on it, Megatron has a plain way without: there is no stub.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, NoReturn

from mindspeed.adaptor.importing import PostImportHooks

_UNGUARDED = re.compile(r"^(import|from) triton\b", re.M)  # not indented: in no `try` or `if`

_MACHINERY = ("importlib", __name__, PostImportHooks.__module__)


def install(hooks: PostImportHooks, package: str = "megatron") -> None:
    """Import the modules of ``package`` that insist on Triton with the stub if it is absent."""
    if importlib.util.find_spec("triton") is None:
        hooks.around_modules_of(package, _context)


def _context(spec: ModuleSpec) -> AbstractContextManager[None]:
    source = getattr(spec.loader, "get_source", lambda name: "")(spec.name) or ""
    if "triton" not in source:
        return nullcontext()
    insists = _UNGUARDED.search(source) and not _importer_guards()
    return _stub_triton() if insists else _no_triton()


def _importer_guards() -> bool:
    """Whether the statement that imports the present module is inside a ``try``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"].startswith(_MACHINERY):
        frame = frame.f_back
    if frame is None:
        return False
    line, source = frame.f_lineno, "".join(linecache.getlines(frame.f_code.co_filename))
    return any(
        isinstance(node, ast.Try) and node.handlers and _covers(node.body, line)
        for node in ast.walk(ast.parse(source))
    )


def _covers(body: Sequence[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


@contextmanager
def _stub_triton() -> Iterator[None]:
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


@contextmanager
def _no_triton() -> Iterator[None]:
    """``import triton`` fails inside this block, which may be inside one with the stub."""
    names = ("triton", "triton.language")
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        sys.modules.update(hidden)


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
