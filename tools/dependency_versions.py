"""Keep the table of docs/installation.md: both ends of the ranges of pyproject.toml.

python tools/dependency_versions.py                     write the table from the TOML file in docs
python tools/dependency_versions.py --check             fail where it is out of date, or a range has
                                                        no lower end, or another than was measured
python tools/dependency_versions.py --measure lowest newest
python tools/dependency_versions.py --measure lowest --only data cli

``--measure`` makes an environment for each end, ``build/dependencies/END``. Its torch and Megatron
are those of constraints.txt: tools/torch_versions.py and tools/megatron_versions.py vary these. In
``lowest``, every package that pyproject.toml names for users has the release that it names; in
``newest``, the newest that pip finds. What these need in turn is the newest that fits in both.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from feature_table import ROOT, update
from megatron_release import Data, load, store
from packaging.requirements import Requirement
from torch_versions import PAGE, PASSES, pytest_verdict

DATA = ROOT / "docs" / "dependency_versions.toml"
_HEAD = "# What passes at the ends of ranges; written by tools/dependency_versions.py --measure.\n"
ENDS = ("lowest", "newest")
EXTRAS = ("megatron", "suite", "data", "plot", "wandb", "serve", "grammar", "eval", "types")
"""What users install; test tools and linters are those of constraints.txt."""
ELSEWHERE = ("torch", "megatron-core")
"""Have a table of their own."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "peft", "accelerate")
_IMPORTS = """
import importlib, pathlib
import mindspeed.megatron_adaptor  # before anything of Megatron
for file in sorted(pathlib.Path("mindspeed").rglob("*.py")):
    if file.name != "__main__.py":
        try:
            importlib.import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
        except ModuleNotFoundError as error:
            if error.name not in ("triton", "torch_npu"):  # of a device
                raise
"""
PARTS = {
    "imports": ("every module is imported", ()),
    "data": ("corpus, tokenizers, data sets", ("tests/data",)),
    "models": ("model families, Hugging Face", ("tests/models",)),
    "checkpoint": ("checkpoints, conversion", ("tests/checkpoint",)),
    "training": ("training, recipes, logs", ("tests/training", "tests/recipes")),
    "lora": ("LoRA, preferences", ("tests/lora", "tests/preference")),
    "inference": ("generation, server, grammars", ("tests/inference",)),
    "evaluation": ("benchmarks, lm-evaluation-harness", ("tests/evaluation",)),
    "compare": ("recorded trainings", ("tests/compare",)),
    "cli": ("command line, plots, pages", ("tests/cli",)),
    "security": ("files and untrusted input", ("tests/security",)),
    "tutorials": ("commands of the tutorials", ("tests/docs/test_commands.py",)),
}
"""In words, and folders; of folders the quick tests, of a file all."""


def requirements() -> Iterator[Requirement]:
    """What users install, but for :data:`ELSEWHERE`, in the order of pyproject.toml."""
    project = load(ROOT / "pyproject.toml")["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][one] for one in EXTRAS)]
    seen = set(ELSEWHERE) | {"mindspeed"}
    for one in map(Requirement, (text for group in groups for text in group)):
        if one.name not in seen:
            seen.add(one.name)
            yield one


def lowest(one: Requirement) -> str:
    """The first release of a range; empty where it has no lower end."""
    return next((end.version for end in one.specifier if end.operator in (">=", "==")), "")


def pins(*names: str) -> list[str]:
    """Lines of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return [re.findall(rf"^{name}==[^\s;]+", text, re.M)[0] for name in names]


def environment(end: str) -> Path:
    """Make the environment of an end, anew; its interpreter."""
    folder = ROOT / "build" / "dependencies" / end
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    held = pins(*ELSEWHERE)
    if end == "lowest":
        held += [f"{one.name}=={lowest(one)}" for one in requirements()]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(held) + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", constraints]
    subprocess.run([*pip, *pins("torch")], check=True)
    subprocess.run([*pip, *pins(*TOOLS), "-e", f".[{','.join(EXTRAS)}]"], cwd=ROOT, check=True)
    return python


def measure(python: Path, names: Sequence[str]) -> dict[str, str]:
    """Releases in an environment, and what passes there."""
    listing = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    done = subprocess.run(listing, capture_output=True, check=True)
    releases = {plain(one["name"]): one["version"] for one in json.loads(done.stdout)}
    found = {one.name: releases[plain(one.name)] for one in requirements()}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    for name in names:
        found[name] = verdict(python, name)
        print(f"{python.parents[1].name} {name}: {found[name]}", flush=True)
    return found


def plain(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def verdict(python: Path, name: str) -> str:
    """:data:`PASSES`, or what failed."""
    words = PARTS[name][1]
    if not words:
        done = subprocess.run([python, "-c", _IMPORTS], cwd=ROOT, capture_output=True, text=True)
        return f"failed: {done.stderr.strip().splitlines()[-1]}" if done.returncode else PASSES
    quick = [] if words[0].endswith(".py") else ["-m", "not slow"]
    return pytest_verdict([*quick, *words], python, workers=2)


def table(data: Data) -> str:
    """One row a package, then one a part; a column an end."""
    rows = [[one.name, *(data[end].get(one.name, "") for end in ENDS)] for one in requirements()]
    rows += [
        [shown, *(data[end].get(name, "") for end in ENDS)] for name, (shown, _) in PARTS.items()
    ]
    lines = [f"| with Python {data[ENDS[0]]['python']} | {' | '.join(ENDS)} |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def problems(data: Data) -> list[str]:
    """Ranges that were not measured, and parts that do not pass; those not measured are empty."""
    found = []
    for one in requirements():
        least, measured = lowest(one), data["lowest"].get(one.name)
        if least != measured:
            found.append(
                f"pyproject.toml: {one}: lowest {least or 'is absent'}, measured {measured}"
            )
    for end in ENDS:
        wrong = [name for name in PARTS if data[end].get(name, PASSES) != PASSES]
        found += [f"{end}: {name} {data[end][name]}" for name in wrong]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure ends, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", nargs="+", metavar="END", choices=ENDS, default=[])
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, default=list(PARTS))
    parser.add_argument("--keep", action="store_true", help="measure in the environments of before")
    args = parser.parse_args(arguments)
    for end in args.measure:
        kept = ROOT / "build" / "dependencies" / end / "bin" / "python"
        python = kept if args.keep else environment(end)
        found = measure(python, args.only)
        data = load(DATA)
        store(DATA, _HEAD, data | {end: data.get(end, {}) | found})
    data = {end: {} for end in ENDS} | load(DATA)
    for problem in (wrong := problems(data)):
        print(problem, file=sys.stderr)
    tables = {PAGE: {"dependency-versions": table(data)}}
    outdated = update(tables, "dependency_versions", check=args.check)
    return int(bool(wrong or outdated))


if __name__ == "__main__":
    sys.exit(main())
