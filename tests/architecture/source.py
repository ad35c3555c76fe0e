"""Imports of the library as its source says them: at import time, inside functions, by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mindspeed"


class Import(NamedTuple):
    """One imported module or name: ``from a import b`` is ``a.b``."""

    line: int
    name: str
    lazy: bool  # inside a function


def sources() -> list[Path]:
    """All Python files of the library."""
    return sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    """The package or module of the library that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a file but those for type checkers alone."""
    package = [*path.relative_to(ROOT).with_suffix("").parts]
    return tuple(imports(parsed(path), package[:-1]))


def imports(tree: ast.AST, package: list[str], lazy: bool = False) -> Iterator[Import]:
    """Every import below ``tree``.

    Args:
        tree: A syntax tree.
        package: Of the file, for relative imports.
        lazy: Whether ``tree`` is inside a function.
    """
    for node in ast.iter_child_nodes(tree):
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, f"{start}.{a.name}", lazy) for a in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.orelse, []), package, lazy)
            continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (Import(node.lineno, name, True) for name in _beginning(node))
        yield from imports(node, package, inside)


def _beginning(call: ast.Call) -> Iterator[str]:
    """The module that ``import_module("a.b")`` or ``import_module(f"a.b.{c}")`` names."""
    value: ast.AST = call.args[0]
    if isinstance(value, ast.JoinedStr):
        value = value.values[0]
    if isinstance(value, ast.Constant):
        yield str(value.value).rstrip(".")
