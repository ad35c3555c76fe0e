"""Import paths of the original MindSpeed, as data: ``names.yaml`` says what each name is here.

    from mindspeed.core.context_parallel.model_parallel_utils import get_ring_ranks_for_intra_window

A module of the table has no file. It is made when it is imported, and its names are those of other
modules, of this library, Megatron or Transformer Engine, looked up when they are used. A name that
is not offered raises an ImportError (as an attribute: an AttributeError) with what to use instead.
docs/migrating.md is written from the same table.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = Path(__file__).with_name("names.yaml")
_NEED_THE_ADAPTOR = ("megatron", "transformer_engine")
_ADAPTOR = "mindspeed.megatron_adaptor"  # like every target, only a name for this module


@dataclass(frozen=True)
class OriginalModule:
    """A module of the original.

    Attributes:
        name: Its import path.
        by: Projects that import it.
        works: Name -> ``module:name`` that it stands for, ``module`` where the names are equal.
        forwards: The module whose attributes are read and set through this one.
        instead: Name that is not offered -> what to use, or why there is none.
        otherwise: The same for all other names, and all modules below; a module that has nothing
            else cannot be imported.
    """

    name: str
    by: tuple[str, ...] = ()
    works: Mapping[str, str] = field(default_factory=dict)
    forwards: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""

    @property
    def importable(self) -> bool:
        """Whether single names of it are known, so that they are looked up in it."""
        return bool(self.works or self.forwards or self.instead)

    def refusal(self, name: str) -> str:
        """The sentence on a name that is not offered."""
        why = self.instead.get(name, self.otherwise) or "docs/migrating.md lists what there is"
        return _sentence(f"{self.name}.{name}", why)


@cache
def table() -> Mapping[str, OriginalModule]:
    """The rows of ``names.yaml`` by import path."""
    from mindspeed.parsing import read_yaml

    rows = read_yaml(FILE, FILE.name)
    return {
        name: OriginalModule(name, **{**row, "by": tuple(row.get("by", ()))})
        for name, row in rows.items()
    }


def resolve(target: str, name: str) -> Any:
    """The value of a row of ``works``; a target without names is a module."""
    module, _, attribute = target.partition(":")
    if module.partition(".")[0] in _NEED_THE_ADAPTOR:
        importlib.import_module(_ADAPTOR)
    found = importlib.import_module(module)
    return found if attribute == "*" else getattr(found, attribute or name)


class _Module(ModuleType):
    """A module without a file whose names are looked up in the table."""

    def __getattr__(self, name: str) -> Any:
        row = table().get(self.__name__, OriginalModule(self.__name__))
        if name in row.works:
            value = resolve(row.works[name], name)
            vars(self)[name] = value
            return value
        if row.forwards and not name.startswith("__"):
            found = importlib.import_module(row.forwards)
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(row.refusal(name))

    def __setattr__(self, name: str, value: Any) -> None:
        row = table().get(self.__name__)
        if row is not None and row.forwards and not name.startswith("__"):
            setattr(importlib.import_module(row.forwards), name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *getattr(table().get(self.__name__), "works", ())})


class OriginalNames(MetaPathFinder, Loader):
    """Finds the modules of the table below ``package``."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table, or of a package around one.

        Raises:
            ImportError: The original's module or name is not offered; what to use.
        """
        if not f"{fullname}.".startswith(f"{self._package}."):
            return None
        rows = table()
        row = rows.get(fullname)
        here = row is not None and row.importable
        if here or any(name.startswith(f"{fullname}.") for name in rows):
            return ModuleSpec(fullname, self, origin=__name__, is_package=True)
        if why := _refusal(fullname, rows):
            raise ImportError(why, name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return _Module(spec.name, f"Names of the original {spec.name}, see mindspeed.original.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: names are looked up when they are used."""


def install() -> None:
    """Let the modules of the table be imported, where there is no file."""
    if not any(isinstance(finder, OriginalNames) for finder in sys.meta_path):
        sys.meta_path.append(OriginalNames("mindspeed"))
        # Empty directories that a checkout of an older version has left are no packages.
        sys.meta_path[:0] = [OriginalNames("mindspeed.core"), OriginalNames("mindspeed.model")]


def _sentence(name: str, why: str) -> str:
    """The message; links to a page of the documentation as its path."""
    plain = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", why).replace("`", "")
    return plain and f"{name} of the original MindSpeed is not offered: {plain}"


def _refusal(fullname: str, rows: Mapping[str, OriginalModule]) -> str:
    """What is said of a module that cannot be imported, or of a name in ``from module import``."""
    package, rest = fullname, ""
    while package:
        row = rows.get(package)
        if row is not None:
            return row.refusal(rest) if rest else _sentence(fullname, row.otherwise)
        package, _, last = package.rpartition(".")
        rest = f"{last}.{rest}".rstrip(".")
    return ""
