"""The parts of a module's spec: a ``ModuleSpec`` or a class; that of an MLP is, since megatron-core
0.18, what builds it with the submodules bound."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

from megatron.core.transformer.spec_utils import get_module


def class_of(spec: Any) -> Any:
    """The class that is built."""
    if not isinstance(spec, functools.partial):
        return get_module(spec)
    build: Any = spec.func  # a class, or a method of it
    return build.__self__ if inspect.ismethod(build) else build


def submodules_of(spec: Any) -> Any:
    """The dataclass of its submodules; None without."""
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def with_submodules(spec: Any, **modules: Any) -> Any:
    """The same spec with these submodules instead of those of the same names."""
    submodules = replace(submodules_of(spec), **modules)
    if isinstance(spec, functools.partial):
        return functools.partial(spec, submodules=submodules)
    return replace(spec, submodules=submodules)
