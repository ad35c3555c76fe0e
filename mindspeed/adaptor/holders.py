"""Finds who holds a function that was taken before its dispatcher was in place."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

Place = tuple[ModuleType, str]


def replace_in_modules(new: Mapping[int, Any]) -> dict[int, list[Place]]:
    """Put ``new[id(value)]`` wherever a loaded module holds such a ``value`` by a name.

    Returns:
        The places of each key, those in the module that defines the value excepted.
    """
    found: dict[int, list[Place]] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])
                found.setdefault(id(value), []).append((module, name))
    return found


def other_holders(functions: Mapping[int, Any], ignore: Iterable[Any]) -> dict[int, str]:
    """Name those who hold functions otherwise: attributes of classes, closures, containers.

    Args:
        functions: by id, what was replaced in all modules.
        ignore: objects that may hold them, themselves or by an attribute.

    Returns:
        The names for each function that is held.
    """
    known = {id(one) for one in (functions, *ignore)} | {id(vars(one)) for one in ignore}

    def holders(*of: Any) -> list[Any]:
        return [
            one
            for one in gc.get_referrers(*of)
            if not isinstance(one, FrameType) and one is not of and id(one) not in known
        ]

    if not holders(*functions.values()):
        return {}
    gc.collect()  # wrappers that were taken back are cycles
    names = {key: sorted(set(map(_name, holders(functions[key])))) for key in functions}
    return {key: ", ".join(found) for key, found in names.items() if found}


def _name(holder: Any, depth: int = 3) -> str:
    """The class, function or module that ``holder`` belongs to, found by who refers to it."""
    if isinstance(holder, ModuleType):
        return holder.__name__
    if isinstance(holder, type | FunctionType):
        return f"{holder.__module__}.{holder.__qualname__}"
    for owner in gc.get_referrers(holder) if depth else ():
        if isinstance(owner, ModuleType | type | FunctionType | dict | tuple | CellType):
            return _name(owner, depth - 1)
    return f"a {type(holder).__name__}"
