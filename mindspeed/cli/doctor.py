"""Check this machine: versions, device, Transformer Engine, gloo, files, and what each door lacks.

mindspeed doctor
mindspeed doctor --security DIR     modes, owners and umask against the recommended table

A door is a way in: scripts of Megatron-LM, training from text, serving, a framework. What one needs
is read from the extras of the installed package; nothing is imported.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed import __version__
from mindspeed.adaptor.health import HealthCheck, examine
from mindspeed.adaptor.versions import has_megatron_training

HELP = "check this machine: versions, devices, packages; what each door still lacks"
_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]no[/red]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--security", type=Path, metavar="DIR", help="audit the files below DIR")


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if a required check fails."""
    if args.security:
        from mindspeed.security import audit

        checks = [HealthCheck(*row) for row in audit(args.security)]
        _print_table(checks)
    else:
        checks = examine()
        _print_table(checks)
        _print_doors(examine_doors())
    return 1 if any(check.status == "bad" for check in checks) else 0


def _print_table(checks: Iterable[HealthCheck]) -> None:
    table = Table("", "what", "found", "what to do")
    for check in checks:
        cells = (check.what, check.found, check.advice)  # advice has brackets: mindspeed[suite]
        table.add_row(_MARKS[check.status], *map(escape, cells))
    Console().print(table)


def _print_doors(checks: Iterable[HealthCheck]) -> None:
    """Lines, not a table: what to type is never broken."""
    console = Console(soft_wrap=True, highlight=False)
    console.print("what each door still lacks here:")
    for check in checks:
        padding = " " * (5 - len(check.status))
        console.print(f"{_MARKS[check.status]}{padding}{escape(f'{check.what}: {check.found}')}")
        if check.advice:
            console.print(f"       {escape(check.advice)}")


PACKAGE = "mindspeed"
EXTRAS = {
    "pretrain, finetune, chat": "suite",
    "preprocess of compressed files": "data",
    "plot, --plot": "plot",
    "serve": "serve",
    "serve, JSON schemas": "grammar",
    "evaluate": "eval",
    "check --types": "types",
}
"""Door -> extra of this package."""
FRAMEWORKS = {"ms-swift": "ms-swift", "verl": "verl", "megatron-bridge": "bridges-alone"}
"""Package -> its heading on the page of frameworks."""


def examine_doors() -> list[HealthCheck]:
    """All doors."""
    try:
        extras = [_extra(door, extra) for door, extra in EXTRAS.items()]
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install -e . in the checkout"
        extras = [HealthCheck("note", "packages", "mindspeed itself is not installed", advice)]
    frameworks = [_framework(*both) for both in FRAMEWORKS.items()]
    return [_scripts(), *extras, _programs(), _compiler(), *frameworks]


def lacks(extra: str) -> list[str]:
    """Packages of an extra of this package that are missing, or are there in another version."""
    found = []
    for text in importlib.metadata.requires(PACKAGE) or []:
        one = Requirement(text)
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if canonicalize_name(one.name) == PACKAGE:
            found += [name for part in sorted(one.extras) for name in lacks(part)]
        elif (version := _version(one.name)) is None:
            found.append(one.name)
        elif not one.specifier.contains(version, prereleases=True):
            found.append(f"{one.name}{one.specifier} (there is {version})")
    return list(dict.fromkeys(found))


def _extra(door: str, extra: str) -> HealthCheck:
    if missing := lacks(extra):
        advice = f"pip install 'mindspeed[{extra}]'"
        return HealthCheck("note", door, f"lacks {', '.join(missing)}", advice)
    return HealthCheck("ok", door, "complete")


def _scripts() -> HealthCheck:
    door = "scripts of Megatron-LM"
    if has_megatron_training():
        return HealthCheck("ok", door, "megatron.training is on the path")
    release = f"core_v{__version__.rpartition('.')[0]}"
    return HealthCheck(
        "note",
        door,
        "lacks a checkout of Megatron-LM",
        f"git clone -b {release} https://github.com/NVIDIA/Megatron-LM.git; put it on PYTHONPATH",
    )


def _programs() -> HealthCheck:
    door = "evaluate, programs of HumanEval"
    if shutil.which("bwrap"):
        return HealthCheck("ok", door, "run in bubblewrap")
    advice = "apt-get install bubblewrap: programs then have a root directory of their own"
    return HealthCheck("note", door, "lacks bubblewrap; filters of the kernel isolate them", advice)


def _compiler() -> HealthCheck:
    door = "torch.compile, data set helper"
    command = os.environ.get("CXX", "c++")
    if path := shutil.which(command):
        return HealthCheck("ok", door, path)
    return HealthCheck("note", door, f"lacks a C++ compiler ({command})", "apt-get install g++")


def _framework(package: str, heading: str) -> HealthCheck:
    if version := _version(package):
        return HealthCheck("ok", package, version)
    return HealthCheck("note", package, "not installed", f"docs/frameworks.md#{heading}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
