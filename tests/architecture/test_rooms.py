"""The house rules that can be read off the source: floors, and who may know Megatron."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mindspeed"

# Below the bridge nothing knows Megatron; an algorithm package may in its file megatron.py.
WITHOUT_MEGATRON = {
    "device",
    "ops",
    "attention",
    "tensor_parallel",
    "pipeline",
    "moe",
    "memory",
    "optimizer",
    "testing",
    "errors.py",
    "files.py",
    "journal.py",
    "security.py",
}
# The suite may ask for its arguments; the adaptor stands in Megatron-LM's own functions, which do.
MAY_ASK_FOR_ARGUMENTS = {
    "adaptor",
    "cli",
    "training",
    "checkpoint",
    "storage",
    "data",
    "models",
    "lora",
    "inference",
    "evaluation",
}


def sources(rooms: set[str] | None = None, without: Collection[str] = ()) -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if (rooms is None or room(path) in rooms) and room(path) not in without
    ]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imports(tree: ast.AST, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Line and module of every import; without ``lazy`` only those that run at import time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.orelse, []), lazy)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, lazy)


def offenders(paths: list[Path], prefix: str, lazy: bool = True) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in paths
        for line, module in imports(ast.parse(path.read_text()), lazy)
        if f"{module}.".startswith(f"{prefix}.")
    ]


def test_the_import_finder_sees_every_form() -> None:
    tree = ast.parse(
        "import a.b, c\n"
        "from d.e import f\n"
        "from . import g\n"
        "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
        "class K:\n    import j\n"
        "def l():\n    import m\n"
    )
    assert [name for _, name in imports(tree)] == ["a.b", "c", "d.e", "i", "j", "m"]
    assert [name for _, name in imports(tree, lazy=False)] == ["a.b", "c", "d.e", "i", "j"]


def test_below_the_bridge_nobody_imports_megatron() -> None:
    paths = [path for path in sources(WITHOUT_MEGATRON) if path.name != "megatron.py"]
    assert paths
    assert offenders(paths, "megatron") == []


def test_the_bridge_and_its_entry_import_megatron_only_when_they_are_used() -> None:
    """The adaptor is imported before Megatron and must not freeze Megatron's import order."""
    paths = sources({"adaptor", "te", "features", "profiling", "megatron_adaptor.py"})
    assert paths
    assert offenders(paths, "megatron", lazy=False) == []


def test_only_the_adaptor_imports_megatron_training() -> None:
    """The PyPI wheel has megatron.core only."""
    assert offenders(sources(without={"adaptor"}), "megatron.training") == []
    assert offenders(sources(without={"adaptor"}), "megatron.legacy") == []


def test_nobody_calls_a_global_get_args_below_the_suite() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(without=MAY_ASK_FOR_ARGUMENTS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and not node.args
        and ast.unparse(node.func).split(".")[-1] == "get_args"
    ]
    assert found == []


def test_the_floors_of_the_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
