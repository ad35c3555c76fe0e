"""Check every patch against the source of a Megatron, without importing it.

Resolving a target in the syntax tree needs neither a device nor Megatron's own dependencies and
takes a few milliseconds, so the same check runs against the installed megatron-core, any unpacked
wheel and any checkout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from packaging.version import Version

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import fits
from mindspeed.adaptor.versions import read_version


@dataclass(frozen=True)
class ContractFinding:
    """Result of the check of one patch: ``problem`` is empty when the contract holds."""

    patch: Patch
    status: str  # "ok", "not needed", "no such module", "missing", "changed"
    problem: str = ""


def check_contracts(patches: Iterable[Patch], root: Path) -> list[ContractFinding]:
    """Compare ``patches`` with the Megatron source tree below ``root``.

    A target in a module that the tree does not have at all (``megatron.training`` in a wheel) is
    reported as "no such module": the patch waits for an import that never comes.
    """
    version = read_version(root)
    return [_check(patch, root, version) for patch in patches]


def _check(patch: Patch, root: Path, version: Version) -> ContractFinding:
    if not patch.applies_to(version):
        return ContractFinding(patch, "not needed")
    source = _source_of(root, patch.module)
    if source is None:
        problem = f"module {patch.module} is absent" if _is_core(patch) else ""
        return ContractFinding(patch, "no such module", problem)
    if patch.kind == "define":
        return _check_new_name(patch, source, version)
    node = _find(_parse(source), patch.qualname)
    undefined = _is_of_dataclass, _is_imported
    if node is None and any(has(_parse(source), patch.qualname) for has in undefined):
        return ContractFinding(patch, "ok")
    if node is None:
        return ContractFinding(
            patch, "missing", f"{patch.target} is absent in megatron-core {version}"
        )
    signature = patch.expected_signature(version)
    if signature is None:
        return ContractFinding(patch, "ok")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ContractFinding(patch, "changed", f"{patch.target} is not a function in {version}")
    actual = _parameters(node)
    if not fits(signature, actual):
        given = f"({', '.join(actual)})"
        return ContractFinding(
            patch, "changed", f"{patch.target}: expected {signature}, found {given}"
        )
    return ContractFinding(patch, "ok")


def _check_new_name(patch: Patch, source: Path, version: Version) -> ContractFinding:
    """A name that Megatron must not have, in a class that it must have."""
    holder, _, _ = patch.qualname.rpartition(".")
    if holder and _find(_parse(source), holder) is None:
        problem = f"{patch.module}:{holder} is absent in megatron-core {version}"
        return ContractFinding(patch, "missing", problem)
    if _find(_parse(source), patch.qualname) is not None:
        return ContractFinding(
            patch, "changed", f"{patch.target} exists in megatron-core {version}"
        )
    return ContractFinding(patch, "ok")


def _is_core(patch: Patch) -> bool:
    """Wheels have ``megatron.core``; the other packages come with a checkout only."""
    return patch.module.startswith("megatron.core.")


def _source_of(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for candidate in (base.with_suffix(".py"), base / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@lru_cache(maxsize=64)
def _parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def _find(tree: ast.Module, qualname: str) -> ast.AST | None:
    node: ast.AST = tree
    for part in qualname.split("."):
        found = [child for child in _definitions(node) if _defines(child, part)]
        if not found:
            return None
        # `try: class X ... except ImportError: X = None` defines twice: the definition counts
        node = next((child for child in found if not _is_assignment(child)), found[0])
    return node


def _is_of_dataclass(tree: ast.Module, qualname: str) -> bool:
    """Whether it is the constructor of a dataclass, which has no definition."""
    holder, _, name = qualname.rpartition(".")
    node = _find(tree, holder) if name == "__init__" and holder else None
    return isinstance(node, ast.ClassDef) and any(
        re.search(r"\bdataclass\b", ast.unparse(one)) for one in node.decorator_list
    )


def _is_imported(tree: ast.Module, qualname: str) -> bool:
    """Whether the module has the name from another one (``from x import name``)."""
    return any(
        isinstance(node, ast.ImportFrom)
        and any((alias.asname or alias.name) == qualname for alias in node.names)
        for node in _definitions(tree)
    )


def _definitions(node: ast.AST) -> Iterable[ast.AST]:
    """The statements of a body, also inside ``if`` and ``try`` blocks."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child)


def _is_assignment(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return False


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if arguments.vararg:
        names.append("*" + arguments.vararg.arg)
    names += [argument.arg for argument in arguments.kwonlyargs]
    if arguments.kwarg:
        names.append("**" + arguments.kwarg.arg)
    return names
