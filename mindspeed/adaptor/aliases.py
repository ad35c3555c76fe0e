"""Finds the copies that ``from x import y`` made of a patched object, and replaces them.

A search looks at every name of hundreds of modules. In a forked process that is dearer than it
looks: reading a name writes the reference count of its value, so the search copies most memory
pages of the modules it shares with its parent. :meth:`AliasSearch.index` lets the parent look once,
for all its children.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindspeed.adaptor.importing import is_initializing

Place = tuple[ModuleType, str]


@dataclass(frozen=True)
class _Index:
    """The places of every callable in the modules that were loaded at one moment."""

    places: Mapping[int, tuple[Place, ...]]
    count: int  # of all loaded modules
    last: tuple[str, ModuleType]  # the newest of them
    main: ModuleType | None

    def loaded_since(self) -> list[ModuleType] | None:
        """The modules loaded later; None if modules were also removed or replaced."""
        name, module = self.last
        later = []
        for other in reversed(sys.modules):
            if other == name:
                break
            later.append(other)
        same = self.count + len(later) == len(sys.modules) and sys.modules.get(name) is module
        if not same or sys.modules.get("__main__") is not self.main:
            return None
        return [sys.modules[name] for name in later]


class AliasSearch:
    """Replaces values in all loaded modules that may hold aliases."""

    def __init__(self, holds_aliases: Callable[[ModuleType], bool]) -> None:
        self._holds_aliases = holds_aliases
        self._index: _Index | None = None

    def index(self) -> None:
        """Look at all names now, so that the next replacement need not.

        For a process that forks others. Until then no name of a loaded module may get another
        module's function; modules loaded later are searched as always.
        """
        # The import system moves a module to the end of sys.modules when its body has run.
        loaded = [
            (name, module) for name, module in sys.modules.items() if not is_initializing(module)
        ]
        places: dict[int, tuple[Place, ...]] = {}
        for module in self._searched([module for _, module in loaded]):
            for name, value in vars(module).items():
                if callable(value):
                    places[id(value)] = (*places.get(id(value), ()), (module, name))
        self._index = _Index(places, len(loaded), loaded[-1], sys.modules.get("__main__"))

    def replace(self, new: Mapping[int, Any]) -> None:
        """Put ``new[id(value)]`` wherever a module holds such a ``value``."""
        index, self._index = self._index, None
        modules = index.loaded_since() if index else None
        if index is None or modules is None:
            modules = list(sys.modules.values())
        else:
            for key, value in new.items():
                for module, name in index.places.get(key, ()):
                    if id(vars(module).get(name)) == key:
                        setattr(module, name, value)
        for module in self._searched(modules):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])

    def _searched(self, modules: list[ModuleType]) -> list[ModuleType]:
        loaded = (module for module in modules if isinstance(module, ModuleType))
        return [module for module in loaded if self._holds_aliases(module)]
