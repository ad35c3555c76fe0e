"""Check this machine: versions, device, Transformer Engine, gloo, files.

mindspeed doctor
mindspeed doctor --security DIR     modes, owners and umask against the recommended table
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mindspeed.adaptor.health import Check, examine

HELP = "check this machine: versions, devices, packages"
_MARKS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]no[/red]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--security", type=Path, metavar="DIR", help="audit the files below DIR")


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is 1 if a required check fails."""
    if args.security:
        from mindspeed.security import audit

        checks = [Check(*row) for row in audit(args.security)]
    else:
        checks = examine()
    table = Table("", "what", "found", "what to do")
    for check in checks:
        table.add_row(_MARKS[check.status], check.what, check.found, check.advice)
    Console().print(table)
    return 1 if any(check.status == "bad" for check in checks) else 0
