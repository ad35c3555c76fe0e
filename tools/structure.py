"""Count how the package is cut into files.

    python tools/structure.py                the working tree
    python tools/structure.py --list         with the names behind every count
    python tools/structure.py --against REV  with the difference to another commit
    python tools/structure.py --rooms        files and lines of each room

A neighbour is a module of the same folder; a module that only one neighbour imports is often half
an idea. A circle is a set of modules that import each other, imports inside functions and for type
checkers included. Flags are attributes of a namespace called ``args``, those that ``getattr`` names
too; commands (``cli/``) have their own. Modules that translate such a namespace are edges
(:data:`EDGES`), all others take values.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LONG = 50  # lines of a function
Graph = dict[str, set[str]]  # module -> modules that it imports
EDGES = {
    "mindspeed/adaptor/arguments.py": "the arguments of Megatron's own script",
    "mindspeed/adaptor/packed_documents.py": "the arguments of Megatron's own script",
    "mindspeed/adaptor/repairs/scripts/flops.py": "the arguments of Megatron's own script",
    "mindspeed/adaptor/repairs/scripts/jit_warmup.py": "the arguments of Megatron's own script",
    "mindspeed/adaptor/script_job.py": "the arguments of Megatron's own script",
    "mindspeed/checkpoint/architecture.py": "the record of a checkpoint",
    "mindspeed/checkpoint/state.py": "the record of a checkpoint",
    "mindspeed/checkpoint/weights/rank_files.py": "the record of a checkpoint",
    "mindspeed/data/tokenizer_types.py": "the options of a tokenizer",
    "mindspeed/guard/job.py": "the arguments of Megatron's own script",
    "mindspeed/inference/gpt_model.py": "the arguments that a script's model provider reads",
    "mindspeed/job.py": "a job as dataclasses",
    "mindspeed/lora/flags.py": "final values of adapters, and their description",
    "mindspeed/models/config_json.py": "a Hugging Face config.json is read as flags and written",
    "mindspeed/models/dense_families.py": "a Hugging Face config.json is read as flags and written",
    "mindspeed/models/families.py": "a Hugging Face config.json is read as flags and written",
    "mindspeed/models/family.py": "a Hugging Face config.json is read as flags and written",
    "mindspeed/models/moe_configs.py": "a Hugging Face config.json is read as flags and written",
    "mindspeed/models/shape.py": "the sizes of a model by short names",
    "mindspeed/models/weight_source.py": "the record of a checkpoint",
    "mindspeed/planner/layout.py": "a layout is read from flags and written as flags",
    "mindspeed/planner/scripts.py": "the arguments of Megatron's own script",
    "mindspeed/planner/shape.py": "the sizes of a job by the planner's names",
    "mindspeed/profiling/model_flops.py": "the sizes that determine FLOPs",
    "mindspeed/session/original_features.py": "the arguments as features of the original read them",
    "mindspeed/session/session.py": "the class of the namespace, which shows other values",
    "mindspeed/training/configs.py": "Megatron's configurations",
    "mindspeed/training/initialize.py": "final values of a command line",
    "mindspeed/training/recipe.py": "flags of recipes and other files",
    "mindspeed/training/resolve.py": "final values",
    "mindspeed/training/resolve_data.py": "final values of the data",
    "mindspeed/training/resolve_parallel.py": "final values",
    "mindspeed/training/resolve_run.py": "final values",
    "mindspeed/training/resolve_zero.py": "final values: what --zero-stage stands for",
    "mindspeed/training/setup.py": "Megatron's process groups and generators",
}
"""Modules that read or write the namespace of flags, because they translate it -> what to."""


@dataclass(frozen=True)
class Structure:
    """What is counted: names that carry their place, or numbers."""

    files: int
    lines: int
    median_lines: float
    functions: int
    single_importer: tuple[str, ...]
    circles: tuple[str, ...]
    long_functions: tuple[str, ...]
    classes_twice: tuple[str, ...]
    flag_writes: tuple[str, ...]
    flag_reads: tuple[str, ...]
    flags_at_edges: tuple[str, ...]


def on_disk(root: Path = ROOT, package: str = "mindspeed") -> dict[str, str]:
    """Path below ``root`` -> source of every module of the package."""
    paths = sorted((root / package).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}


def at_revision(revision: str, package: str = "mindspeed") -> dict[str, str]:
    """Path -> source of every module of the package in a commit."""
    command = ["git", "-C", str(ROOT), "archive", revision, package]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return {
            entry.name: content.read().decode()
            for entry in files
            if entry.name.endswith(".py") and (content := files.extractfile(entry))
        }


def module_name(path: str) -> str:
    """``a/b.py`` -> ``a.b``, ``a/__init__.py`` -> ``a``."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def import_graph(trees: Mapping[str, ast.Module]) -> Graph:
    """Module of ``trees`` (path -> syntax tree) -> modules that it imports anywhere."""
    names = {module_name(path) for path in trees}
    graph: Graph = {}
    for path, tree in trees.items():
        name = module_name(path)
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        found = (next((m for m in _outward(one) if m in names), name) for one in _imported(tree))
        # A package that imports its own parts, and a part that names a neighbour over the package.
        graph[name] = {one for one in found if not f"{name}.".startswith(f"{one}.")} - {package}
    return graph


def _outward(name: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``: a name that is imported is a module or stands in one."""
    yield name
    yield name.rpartition(".")[0]


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            value = node.args[0]
            first = value.values[0] if isinstance(value, ast.JoinedStr) else value
            if isinstance(first, ast.Constant):
                yield str(first.value).rstrip(".")


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected sets of more than one module (Tarjan), largest first."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted(found, key=lambda circle: (-len(circle), circle))


def single_importers(graph: Graph) -> dict[str, str]:
    """Module -> the only one that imports it, where both lie in one folder."""
    importers: dict[str, set[str]] = {name: set() for name in graph}
    for name, imported in graph.items():
        for one in imported:
            importers[one].add(name)
    return {
        name: other
        for name, (other, *more) in ((n, sorted(by)) for n, by in importers.items() if by)
        if not more and name.rpartition(".")[0] == other.rpartition(".")[0]
    }


def flags_used(
    trees: Mapping[str, ast.Module], *contexts: type[ast.expr_context], edges: bool = False
) -> Iterator[str]:
    """Places outside commands that read (``ast.Load``) or write (``ast.Store``) a flag.

    Those of :data:`EDGES`, or all others.
    """
    for path, tree in trees.items():
        nodes = [] if "/cli/" in path or (path in EDGES) != edges else ast.walk(tree)
        for node in nodes:
            namespace, name, context = _attribute(node)
            if isinstance(context, contexts) and _is_named_args(namespace):
                yield f"{path}:{node.lineno} {name}"  # type: ignore[attr-defined]


def _attribute(node: ast.AST) -> tuple[ast.expr | None, str, ast.expr_context | None]:
    """Object, name and use of ``object.name``, or of ``getattr(object, "name")`` and the like."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr, node.ctx
    if isinstance(node, ast.Call) and len(node.args) > 1:
        called, name = ast.unparse(node.func), node.args[1]
        if called in ("getattr", "hasattr", "setattr") and isinstance(name, ast.Constant):
            return node.args[0], name.value, ast.Store() if called == "setattr" else ast.Load()
    return None, "", None


def _is_named_args(node: ast.expr | None) -> bool:
    return node is not None and ast.unparse(node).split(".")[-1].removeprefix("_") == "args"


def structure(sources: Mapping[str, str]) -> Structure:
    """Count a package (path -> source)."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    lines = [source.count("\n") for source in sources.values()]
    graph = import_graph(trees)
    functions = {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    classes = Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return Structure(
        files=len(lines),
        lines=sum(lines),
        median_lines=median(lines) if lines else 0,
        functions=len(functions),
        single_importer=tuple(f"{m} <- {o}" for m, o in sorted(single_importers(graph).items())),
        circles=tuple(" ".join(circle) for circle in circles(graph)),
        long_functions=tuple(f"{name}, {n} lines" for name, n in functions.items() if n > LONG),
        classes_twice=tuple(f"{name}, {n} times" for name, n in sorted(classes.items()) if n > 1),
        flag_writes=tuple(flags_used(trees, ast.Store)),
        flag_reads=tuple(flags_used(trees, ast.Load)),
        flags_at_edges=tuple(flags_used(trees, ast.Load, ast.Store, edges=True)),
    )


ROWS = {
    "files": "files",
    "lines": "lines",
    "median_lines": "lines of the median file",
    "functions": "functions",
    "single_importer": "modules whose only importer is a neighbour",
    "circles": "import circles",
    "long_functions": f"functions over {LONG} lines",
    "classes_twice": "class names that stand more than once",
    "flag_writes": "writes of flags outside edges and commands",
    "flag_reads": "reads of flags outside edges and commands",
    "flags_at_edges": "flags read or written at edges",
}


def report(now: Structure, before: Structure | None = None, listed: bool = False) -> Iterable[str]:
    """Lines of text: a count a row, with the difference to ``before``."""
    for field, label in ROWS.items():
        value = getattr(now, field)
        line = f"{label:<44}{_number(value):>10,g}"
        if before is not None:
            line += f"{_number(value) - _number(getattr(before, field)):>+10,g}"
        yield line
        if listed and isinstance(value, tuple):
            yield from (f"    {name}" for name in value)


def by_room(sources: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Files and lines of each folder of the package; files outside of folders by their name."""
    found: dict[str, tuple[int, int]] = {}
    for path, source in sources.items():
        room = path.split("/")[1]
        files, lines = found.get(room, (0, 0))
        found[room] = files + 1, lines + source.count("\n")
    return found


def report_rooms(now: Mapping[str, str], before: Mapping[str, str] | None) -> Iterable[str]:
    """Lines of text: a room a row, with the differences to ``before``, those that grew first."""
    rooms, old = by_room(now), {} if before is None else by_room(before)
    grown = {
        name: tuple(
            a - b for a, b in zip(rooms.get(name, (0, 0)), old.get(name, (0, 0)), strict=True)
        )
        for name in sorted({*rooms, *old})
    }
    yield f"{'':<24}{'files':>8}{'lines':>10}"
    for name, (files, lines) in sorted(grown.items(), key=lambda row: -row[1][1]):
        line = "{:<24}{:>8,}{:>10,}".format(name, *rooms.get(name, (0, 0)))
        yield line if before is None else f"{line}{files:>+8,}{lines:>+10,}"


def _number(value: float | tuple[str, ...]) -> float:
    return len(value) if isinstance(value, tuple) else value


def main(arguments: list[str] | None = None) -> None:
    """Print the counts of the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name what is counted")
    parser.add_argument("--against", metavar="REV", help="print the difference to this commit")
    parser.add_argument("--rooms", action="store_true", help="files and lines of each room instead")
    options = parser.parse_args(arguments)
    now, before = on_disk(), at_revision(options.against) if options.against else None
    if options.rooms:
        rows = report_rooms(now, before)
    else:
        rows = report(structure(now), before and structure(before), options.list)
    for line in rows:
        print(line)


if __name__ == "__main__":
    main()
