"""Words and tables of the commands that compare entries: attention, pipeline and moe."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed.errors import ConfigError
from mindspeed.ranges import MAX_SIZE


def tokens(text: str) -> int:
    """A number of tokens, with K or M for 1024 and 1024 squared."""
    match = re.fullmatch(r"(\d{1,12})([kKmM]?)", text.strip())
    found = int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()] if match else 0
    if not 0 < found <= MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 8192 or 8K")
    return found


def chosen(flag: str, text: str, known: Collection[str], suffix: str | None = None) -> list[str]:
    """The entries that ``--flag all`` or ``--flag NAME,NAME`` names, each once.

    Args:
        flag: for messages.
        text: its value.
        known: all entries.
        suffix: of files, which are allowed, too.

    Raises:
        ConfigError: an entry is not known.
    """
    names = list(dict.fromkeys(known if text == "all" else map(str.strip, text.split(","))))
    for name in names:
        if name not in known and not (suffix and name.endswith(suffix)):
            files = f" and no FILE{suffix}" if suffix else ""
            raise ConfigError(f"{flag} {name!r} is none of all, {', '.join(known)}{files}")
    return names


def as_entries(
    found: Sequence[Any], figures: Callable[[Any], dict[str, object]]
) -> list[dict[str, object]]:
    """Plain data of each entry: its figures, or the reason why it does not exist for the job."""
    return [
        {"name": one.name, "flags": one.flags}
        | ({"reason": one.reason} if one.simulation is None else figures(one))
        for one in found
    ]


def print_comparison(
    title: str,
    caption: str,
    head: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    widest: int | None = None,
) -> Console:
    """Print a line for each entry, its name first, in lines of ``widest`` characters.

    Returns:
        The console.
    """
    table = Table(
        title=title,
        caption=caption,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column(head, no_wrap=widest is None, max_width=widest)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    return console
