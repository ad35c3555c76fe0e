"""Architecture rules checked on the source: layers, and which packages may import Megatron."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from mindspeed.features.registry import all_features
from mindspeed.flags import flags_of
from tests.architecture.source import PACKAGE, ROOT, imports_of, parsed, room, sources

# Below the bridge nothing knows Megatron; an algorithm package may in files megatron*.py.
WITHOUT_MEGATRON = {
    "device",
    "ops",
    "attention",
    "tensor_parallel",
    "pipeline",
    "moe",
    "memory",
    "optimizer",
    "instruments",
    "testing",
    "errors",
    "files",
    "journal",
    "json_fields",
    "op_builder",
    "parsing",
    "flags",
    "processes",
    "ranges",
    "security",
    "unpickle",
}
# Functions that a feature may replace, looked up at each call. Taken by name on purpose:
KERNEL_TABLES = ("kernels", "attention_policy", "optimizer_policy", "comm")
TAKEN_BY_NAME = {
    "te/fused_experts.py": "grouped_matmul",  # the plain one, whatever a feature put in its place
    "te/cross_entropy.py": "group_size",  # a helper of the table
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
SUITE = MAY_ASK_FOR_ARGUMENTS - {"adaptor", "cli"} | {"planner"}


def files(rooms: Collection[str] | None = None, without: Collection[str] = ()) -> list[Path]:
    return [
        path
        for path in sources()
        if (rooms is None or room(path) in rooms) and room(path) not in without
    ]


def offenders(paths: list[Path], prefix: str, lazy: bool = True) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{found.line} imports {found.name}"
        for path in paths
        for found in imports_of(path)
        if f"{found.name}.".startswith(f"{prefix}.") and (lazy or not found.lazy)
    ]


def test_modules_below_the_bridge_do_not_import_megatron() -> None:
    paths = [path for path in files(WITHOUT_MEGATRON) if not path.name.startswith("megatron")]
    assert paths
    assert offenders(paths, "megatron") == []


def test_the_bridge_and_its_entry_import_megatron_only_when_they_are_used() -> None:
    """The adaptor is imported before Megatron and must not freeze Megatron's import order."""
    paths = files({"adaptor", "te", "features", "profiling", "session", "megatron_adaptor"})
    assert paths
    assert offenders(paths, "megatron", lazy=False) == []


def test_only_the_adaptor_imports_megatron_training() -> None:
    """The PyPI wheel has megatron.core only."""
    assert offenders(files(without={"adaptor"}), "megatron.training") == []
    assert offenders(files(without={"adaptor"}), "megatron.legacy") == []


def test_production_code_does_not_import_the_tools_of_tests() -> None:
    """What it measures with is in ``mindspeed.instruments``."""
    assert offenders(files(without={"testing"}), "mindspeed.testing") == []


def test_nobody_calls_a_global_get_args_below_the_suite() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files(without=MAY_ASK_FOR_ARGUMENTS)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and not node.args
        and ast.unparse(node.func).split(".")[-1] == "get_args"
    ]
    assert found == []


def test_nobody_takes_a_replaceable_kernel_by_name() -> None:
    """A name that is bound before a feature attaches is the kernel that the feature replaces."""
    tables = tuple(f"mindspeed.te.{table}." for table in KERNEL_TABLES)
    found = {
        path.relative_to(PACKAGE).as_posix(): one.name.split(".")[-1]
        for path in sources()
        for one in imports_of(path)
        if one.name.startswith(tables) and not one.lazy
    }
    assert found == TAKEN_BY_NAME


def test_the_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_outside_device_nobody_asks_whether_the_device_is_called_cpu():
    """``Device.on_host`` says what the name would be asked for, also of a plug-in's device."""
    found = [
        f"{path}:{node.lineno}"
        for path in sources()
        if room(path) != "device"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare)
        and ".name" in ast.unparse(node)
        and "'cpu'" in ast.unparse(node)
    ]
    assert not found, found


def test_what_another_room_must_know_of_features_is_a_trait() -> None:
    """No list of features outside ``features/``: a feature of a plug-in would be missing in it."""
    features = all_features()
    flags = {item.name for feature in features for item in flags_of(feature) if not item.megatron}
    found = set()
    for path in sources():
        if room(path) == "features":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                words = {one.value for one in node.elts if isinstance(one, ast.Constant)}
                if len(words & flags) > 2:
                    found.add(path.relative_to(PACKAGE).as_posix())
    assert found == set()


def test_outside_features_only_the_registry_is_imported() -> None:
    """Facts that others derive from flags belong to the algorithm whose facts they are."""
    doors = tuple(f"mindspeed.features.{name}" for name in ("registry", "feature"))
    found = [
        f"{path.relative_to(ROOT)}:{one.line} imports {one.name}"
        for path in files(without={"features"})
        for one in imports_of(path)
        if one.name.startswith("mindspeed.features.") and not one.name.startswith(doors)
    ]
    assert found == []
