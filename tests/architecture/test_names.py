"""Names of our modules that any file takes exist: also where types are not checked."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, parsed

sys.path.append(str(ROOT / "tools"))
import structure

FOLDERS = ("mindspeed", "tests", "tools", "benchmarks")
OF_ANY_MODULE = frozenset({"__doc__", "__file__", "__name__", "__path__", "__dict__"})


@pytest.mark.slow
def test_every_name_that_a_file_takes_exists() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    unknown = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in paths
        for line, name in unknown_names(parsed(path), path.parent)
    ]
    assert not unknown, "\n".join(unknown)


def test_unknown_names_are_found() -> None:
    source = """
from mindspeed import errors, gone
from mindspeed.errors import ConfigError, Gone
import mindspeed.ranges as ranges
from structure import Structure, absent
errors.ConfigError, errors.Lost, ranges.__file__
def function(ranges):
    return ranges.anything
"""
    found = [name for _, name in unknown_names(ast.parse(source), ROOT / "tools")]
    assert found == [
        "mindspeed.gone",
        "mindspeed.errors.Gone",
        "tools.structure.absent",
        "mindspeed.errors.Lost",
    ]


def unknown_names(tree: ast.Module, folder: Path) -> Iterator[tuple[int, str]]:
    """Line and name of what a file takes from a module of ours that has no such name.

    Args:
        tree: The file.
        folder: Where it is, for what it imports from its neighbours.
    """
    modules: dict[str, Path] = {}
    bound, read = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if path := module(alias.name, folder) if alias.asname else None:
                    modules[alias.asname] = path
        elif isinstance(node, ast.ImportFrom) and not node.level:
            base = module(node.module or "", folder)
            for alias in node.names:
                if path := module(f"{node.module}.{alias.name}", folder):
                    modules[alias.asname or alias.name] = path
                    continue
                bound.add(alias.asname or alias.name)
                if base and not has(base, alias.name):
                    yield node.lineno, f"{dotted(base)}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
                read.append((node.lineno, node.value.id, node.attr))
        else:
            bound |= assigned(node)
    for line, variable, name in read:
        path = None if variable in bound else modules.get(variable)
        if path and not has(path, name):
            yield line, f"{dotted(path)}.{name}"


@cache
def module(name: str, folder: Path) -> Path | None:
    """File of a module of ours, or None."""
    for root in (ROOT, folder):
        path = root.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def dotted(path: Path) -> str:
    """Name of the module in a file."""
    return structure.module_name(path.relative_to(ROOT).as_posix())


def has(path: Path, name: str) -> bool:
    """Whether the module in a file has a name, or makes names only when asked."""
    names = names_of(path)
    if name in names or not names.isdisjoint(("__getattr__", "*")) or name in OF_ANY_MODULE:
        return True
    # A path of the original library is imported by a finder.
    return path.name == "__init__.py" and (
        module(name, path.parent) is not None
        or importlib.util.find_spec(f"{dotted(path)}.{name}") is not None
    )


@cache
def names_of(path: Path) -> frozenset[str]:
    """Names at the top of a file, and those that its functions make there."""
    names = set(_at_the_top(parsed(path)))
    if "global " in path.read_text():
        found = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Global))
        names.update(name for node in found for name in node.names)
    return frozenset(names)


def _at_the_top(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            yield from assigned(node)
            yield from _at_the_top(node)


def assigned(node: ast.AST) -> set[str]:
    """The variable or argument that a node of a syntax tree binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    return {node.arg} if isinstance(node, ast.arg) else set()
