"""Write the page on which pipeline schedules and programs of experts are browsed.

python tools/schedules_page.py FILE.html

What ``mindspeed pipeline plan`` and ``mindspeed moe plan`` find for every position of a few sliders
is computed here, and drawn by the page (``schedules_page.html``), which needs no network. The
documentation is built with it (tools/docs_site.py).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.cli import moe, pipeline
from mindspeed.cli.timeline_plot import Style
from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.instruments.page import page_of
from mindspeed.instruments.timeline import Interval, Timeline
from mindspeed.moe import comparison as programs
from mindspeed.pipeline.schedule import comparison as schedules
from mindspeed.ranges import Parser

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_BYTES = 2_000_000
Look = tuple[str, str, float, str]
"""Of an interval: what the legend says, colour, shade, name."""


@dataclass(frozen=True)
class Slider:
    """A size, and the words of the command line that each of its positions stands for."""

    title: str
    positions: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """One timeline with its figures.

    Attributes:
        cells: its line of the table.
        line: the timeline.
        style: how its intervals look.
        tick: the time that is 1 on the page.
        peaks: activations of each lane at their peak, in A, where lanes are ranks.
    """

    cells: Sequence[str]
    line: Timeline
    style: Style
    tick: float
    peaks: Sequence[float] = ()

    def packed(self) -> dict[str, Any]:
        """Plain data of small numbers: an interval as its differences from the one before."""
        line, looks = self.line, dict[Look, int]()
        lanes = [self._lane(line.by_lane[lane], looks) for lane in line.lanes]
        return {
            "cells": self.cells,
            "lanes": [[lane, line.thin.get(lane, "")] for lane in line.lanes],
            "end": self._ticks(line.end),
            "marks": list(map(self._ticks, line.marks)),
            "tick": self.tick * self.style.scale,
            "unit": self.style.unit,
            "peaks": [round(peak, 6) for peak in self.peaks],
            "looks": list(looks),
            "rows": lanes,
        }

    def _lane(self, row: Sequence[Interval], looks: dict[Look, int]) -> list[Any]:
        """For each interval its look, and by how much more than expected are its micro-batch (one
        more than the last of that look), start (the last end) and length (that of the last such).
        """
        last: dict[int, tuple[int, int]] = {}
        packed, clock = [], 0
        for one in row:
            number = self.style.number(one)
            name = "" if number else one.name
            shade = round(self.style.shade(one), 3)
            label = self.style.label_of(one)
            key = (label, self.style.every_color[label], shade, name)
            look = looks.setdefault(key, len(looks))
            start, end = self._ticks(one.start), self._ticks(one.end)
            count, length = int(number or 0), end - start
            counted, lasted = last.get(look, (-1, 0))
            packed.append((look, count - counted - 1, start - clock, length - lasted))
            last[look], clock = (count, length), end
        return [list(column) for column in zip(*packed, strict=True)]

    def _ticks(self, time: float) -> int:
        return round(time / self.tick)


def schedule(one: schedules.PricedSchedule) -> Table:
    """A pipeline schedule on the page."""
    found = one.simulation
    assert found is not None
    return Table(
        pipeline.cells(one), found.lanes, pipeline.style_of([found]), 1 / 480, found.peak_memory
    )


def program(one: programs.PricedProgram) -> Table:
    """A program of experts on the page."""
    assert one.simulation is not None
    line = moe.visible(one.simulation.lanes)
    return Table(moe.cells(one), line, moe.style(), line.end / 2000)


@dataclass(frozen=True)
class Part:
    """One half of the page: a command, and a line for each of its entries.

    Attributes:
        name: of its elements.
        title: above it.
        command: that shows the same in a terminal, before the words of the sliders.
        columns: of its table, the name of an entry first.
        sliders: its sizes.
        first: position of each slider at first.
        drawn: entries that are drawn at first.
        entries: their flags by name.
        add_arguments: declares the options of the command.
        job_of: the job that the options describe.
        compare: prices all entries for a job.
        table: of an entry that exists.
    """

    name: str
    title: str
    command: str
    columns: tuple[str, ...]
    sliders: tuple[Slider, ...]
    first: tuple[int, ...]
    drawn: tuple[str, ...]
    entries: Mapping[str, str]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    job_of: Callable[[argparse.Namespace], Any]
    compare: Callable[[Any], Sequence[Any]]
    table: Callable[[Any], Table]

    def positions(self) -> list[tuple[str, ...]]:
        """The words of every position, the last slider moving first."""
        return list(itertools.product(*(one.positions.values() for one in self.sliders)))

    def at(self, words: Sequence[str]) -> list[dict[str, Any] | str]:
        """The packed table of every entry at one position, or why there is none."""
        parser = Parser(self.command)
        self.add_arguments(parser)
        line = " ".join([*self.command.split()[2:], *words])
        try:
            found = self.compare(self.job_of(parser.parse_args(line.split())))
        except ConfigError as error:  # the sizes do not suit each other
            return [str(error)] * len(self.entries)
        return [one.reason or self.table(one).packed() for one in found]

    def data(self) -> dict[str, Any]:
        """Everything that the page shows; equal tables are there once."""
        with ProcessPoolExecutor() as pool:
            every = list(pool.map(self.at, self.positions()))
        tables = dict[str, int]()
        places = [
            [tables.setdefault(json.dumps(one), len(tables)) for one in found] for found in every
        ]
        return {
            "name": self.name,
            "title": self.title,
            "command": self.command,
            "columns": self.columns,
            "sliders": [[one.title, list(one.positions.items())] for one in self.sliders],
            "first": self.first,
            "drawn": self.drawn,
            "entries": list(self.entries.items()),
            "places": places,
            "tables": [json.loads(one) for one in tables],
        }


def sizes(flag: str, *values: int | str) -> dict[str, str]:
    """Positions of a slider over one flag."""
    return {str(value): f"{flag} {value}" for value in values}


PIPELINE = Part(
    "pipeline",
    "Pipeline schedules",
    "mindspeed pipeline plan",
    ("schedule", *pipeline.COLUMNS),
    (
        Slider("pipeline ranks", sizes("--pp", 2, 4, 8)),
        Slider("micro-batches", sizes("--microbatches", 4, 8, 16)),
        Slider("model chunks of a rank", sizes("--vpp", 1, 2, 4)),
        Slider(
            "gradients of inputs + of weights, in forwards",
            {
                "1 + 1": "",
                "1.5 + 0.5": "--input-grad 1.5 --weight-grad 0.5",
                "0.7 + 1.3": "--input-grad 0.7 --weight-grad 1.3",
            },
        ),
        Slider(
            "each all-to-all of experts, in forwards",
            {
                "none": "",
                "0.25": "--exchange 0.25",
                "0.25, in pairs": "--exchange 0.25 --pairs",
                "0.5": "--exchange 0.5",
                "0.5, in pairs": "--exchange 0.5 --pairs",
            },
        ),
    ),
    (1, 1, 1, 0, 0),
    ("1f1b", "interleaved", "zb-v", "v-half"),
    {name: one.flags for name, one in schedules.ENTRIES.items()},
    pipeline.add_arguments,
    pipeline.job_of,
    schedules.compare,
    schedule,
)
EXPERTS = Part(
    "experts",
    "Programs of a mixture-of-experts layer",
    "mindspeed moe plan",
    ("program", *moe.COLUMNS),
    (
        Slider("model", sizes("--model", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")),
        Slider("tokens of a micro-batch", sizes("--tokens", "2K", "4K", "8K")),
        Slider("expert-parallel ranks", sizes("--ep", 4, 8, 16, 32)),
        Slider("tensor-parallel ranks", sizes("--tp", 1, 2)),
        Slider(
            "time of a byte on the links",
            {
                "x 0.5": "--link-bandwidth 400 --network-bandwidth 50",
                "x 1": "",
                "x 2": "--link-bandwidth 100 --network-bandwidth 12.5",
                "x 4": "--link-bandwidth 50 --network-bandwidth 6.25",
            },
        ),
    ),
    (1, 1, 2, 0, 1),
    ("megatron", "overlap", "dedup", "fb-overlap"),
    {name: one.flags for name, one in programs.ENTRIES.items()},
    moe.add_arguments,
    moe.job_of,
    programs.compare,
    program,
)


def packed(parts: Sequence[Part] = (PIPELINE, EXPERTS)) -> str:
    """Everything that is computed for the page: minutes for all of it, on one core."""
    text = json.dumps([part.data() for part in parts], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def page(data: str) -> str:
    """The whole page.

    Raises:
        ConfigError: it is too large.
    """
    text = page_of(TEMPLATE, data)
    if len(text) > MOST_BYTES:
        raise ConfigError(f"the page has {len(text):,} bytes, at most {MOST_BYTES:,} are allowed")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    atomic_write_text(parser.parse_args(arguments).file, page(packed()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
