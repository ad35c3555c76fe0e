"""Numbers of plans as text: bytes and FLOPs of a table in one unit, which suits the largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Unit:
    """A unit of bytes or FLOPs; called with a value it gives the digits."""

    name: str
    size: float

    def __call__(self, value: float) -> str:
        return f"{value / self.size:,.3f}"


_BYTES = (Unit("KiB", 2.0**10), Unit("MiB", 2.0**20), Unit("GiB", 2.0**30))
_FLOPS = (Unit("MFLOP", 1e6), Unit("GFLOP", 1e9), Unit("TFLOP", 1e12), Unit("PFLOP", 1e15))


def bytes_unit(values: Iterable[float]) -> Unit:
    """The unit for a column of bytes."""
    return _unit(values, _BYTES)


def flops_unit(values: Iterable[float]) -> Unit:
    """The unit for a column of FLOPs."""
    return _unit(values, _FLOPS)


def _unit(values: Iterable[float], units: Sequence[Unit]) -> Unit:
    largest = max(values, default=0)
    return next((unit for unit in reversed(units) if largest >= unit.size), units[0])


def ranges(numbers: Sequence[int]) -> str:
    """``0``, ``1-6`` or ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def new_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of names and of numbers."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=title,
        title_style="",
        title_justify="left",
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_whole(table: Table) -> None:
    """Print a table with all its digits, also where the screen is narrower."""
    console = Console()
    width = console.measure(table, options=console.options.update(max_width=1_000)).maximum
    Console(width=max(width, console.width)).print(table)
