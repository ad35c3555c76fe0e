"""Check this machine: versions, device, Transformer Engine, gloo, files, and what each door lacks.

mindspeed doctor
mindspeed doctor --security DIR     modes, owners and umask against the recommended table
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed.adaptor.health import Check, examine
from mindspeed.cli import doors

HELP = "check this machine: versions, devices, packages; what each door still lacks"
_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]no[/red]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--security", type=Path, metavar="DIR", help="audit the files below DIR")


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if a required check fails."""
    if args.security:
        from mindspeed.security import audit

        checks = [Check(*row) for row in audit(args.security)]
        _print_table(checks)
    else:
        checks = examine()
        _print_table(checks)
        _print_doors(doors.examine())
    return 1 if any(check.status == "bad" for check in checks) else 0


def _print_table(checks: Iterable[Check]) -> None:
    table = Table("", "what", "found", "what to do")
    for check in checks:
        cells = (check.what, check.found, check.advice)  # advice has brackets: mindspeed[suite]
        table.add_row(_MARKS[check.status], *map(escape, cells))
    Console().print(table)


def _print_doors(checks: Iterable[Check]) -> None:
    """Lines, not a table: what to type is never broken."""
    console = Console(soft_wrap=True, highlight=False)
    console.print("what each door still lacks here:")
    for check in checks:
        padding = " " * (5 - len(check.status))
        console.print(f"{_MARKS[check.status]}{padding}{escape(f'{check.what}: {check.found}')}")
        if check.advice:
            console.print(f"       {escape(check.advice)}")
