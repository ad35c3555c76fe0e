"""List the fused operators: the implementation for each device, and why others are refused.

mindspeed ops                        all, for the device of this machine
mindspeed ops --device npu           all, as this process would run them on an NPU
mindspeed ops --explain rms_norm     one: signature, every implementation and its refusal
"""

from __future__ import annotations

import argparse
import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.ops.catalog import operators
from mindspeed.ops.registry import DEVICES, Operator

HELP = "list the fused operators: implementation on this device, why not others"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=DEVICES, help="device (default: that of this machine)")
    add("--explain", metavar="NAME", help="describe one operator in full")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list or one explanation."""
    chosen = list(operators())
    if args.explain:
        chosen = [one for one in chosen if args.explain in (one.name, one.public)]
        if not chosen:
            names = ", ".join(one.name for one in operators())
            raise ConfigError(f"no operator {args.explain!r}; there are: {names}")
    name = args.device or device.current().name
    if args.json:
        print(json.dumps([describe(one) for one in chosen], indent=2))
    elif args.explain:
        _print_explanation(chosen[0])
    else:
        _print_table(chosen, name)
    return 0


def describe(operator: Operator) -> dict[str, object]:
    """One operator as plain data."""
    return {
        "name": operator.name,
        "public": operator.public,
        "signature": str(operator.overload._schema),
        "differentiable": operator.differentiable,
        "devices": {
            name: {
                "runs": operator.chosen(name).kind,
                "refused": dict(operator.refusals(name)),
                "note": operator.chosen(name).note,
            }
            for name in DEVICES
        },
    }


def _print_table(chosen: list[Operator], name: str) -> None:
    table = Table(box=SIMPLE_HEAD, title=f"operators on {name}", title_justify="left")
    for column in ("operator", "runs", "gradient", "refused"):
        table.add_column(column)
    for one in chosen:
        refused = "; ".join(f"{kind}: {why}" for kind, why in one.refusals(name))  # type: ignore[arg-type]
        gradient = "yes" if one.differentiable else ""
        table.add_row(one.name, one.chosen(name).kind, gradient, refused)  # type: ignore[arg-type]
    Console().print(table)


def _print_explanation(operator: Operator) -> None:
    console = Console()
    console.print(f"[bold]{operator.name}[/bold]  {operator.public}")
    console.print(str(operator.overload._schema), markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD)
    for column in ("device", "implementation", "here"):
        table.add_column(column)
    for name in DEVICES:
        runs = operator.chosen(name)
        for one in operator.implementations[name]:
            why = one.refused()
            here = f"refused: {why}" if why else "runs" if one is runs else "not reached"
            table.add_row(name, one.kind, here)
    console.print(table)
    for name in DEVICES:
        for one in operator.implementations[name]:
            if one.note:
                console.print(f"{name}, {one.kind}: {one.note}", markup=False, highlight=False)
