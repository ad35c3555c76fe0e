"""The page of schedules and programs of experts: what a browser shows is what the clock says."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed.cli import moe
from mindspeed.errors import ConfigError
from mindspeed.moe import comparison as programs
from mindspeed.pipeline.schedule import comparison as schedules
from mindspeed.pipeline.schedule.costs import Costs
from tests.support.browser import needs_browser, seen_in_browser

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from schedules_page import EXPERTS, PIPELINE, Part, packed, page

AT = {
    "pipeline": ((0, 0, 0, 0, 0), (1, 1, 1, 1, 2), (0, 1, 1, 0, 1)),
    "experts": ((0,) * 5, (1,) * 5),
}
"""Positions of the sliders, one after another."""


def small(part: Part, *positions: int) -> Part:
    """The part with two positions of each slider, or as many as given."""
    sliders = [
        replace(one, positions=dict(list(one.positions.items())[:most]))
        for one, most in zip(part.sliders, positions, strict=True)
    ]
    return replace(part, sliders=tuple(sliders), first=(0,) * len(sliders))


PARTS = (small(PIPELINE, 2, 2, 2, 2, 3), small(EXPERTS, 2, 2, 2, 2, 2))
ACTIONS = """
await ready;
const number = (node, name) => Number(node.getAttribute(name));
const figure = (node) => {
  const idle = [...node.querySelectorAll("rect[fill='#eef1f5']")];
  const bars = [...node.querySelectorAll("rect[data-look]")].map((bar) => ({
    lane: Math.floor(number(bar, "y") / 20), start: number(bar, "x"),
    length: number(bar, "width"), title: bar.querySelector("title").textContent }));
  return { caption: node.querySelector("figcaption").textContent, lanes: idle.length, bars,
    left: number(idle[0], "x"), width: number(idle[0], "width"),
    peaks: [...node.querySelectorAll("[data-peak]")].map((bar) => Number(bar.dataset.peak)) };
};
const look = (part) => {
  const section = document.getElementById(part);
  const rows = [...section.querySelectorAll("tbody tr")].map((row) =>
    [row.dataset.entry, [...row.cells].slice(1).map((cell) => cell.textContent)]);
  const figures = {};
  for (const one of section.querySelectorAll("figure")) figures[one.dataset.figure] = figure(one);
  const command = section.querySelector("pre").textContent;
  const shortest = [...section.querySelectorAll("tr.shortest")].map((row) => row.dataset.entry);
  return { command, shortest, rows: Object.fromEntries(rows), figures };
};
for (const [part, positions] of Object.entries(AT)) {
  for (const box of document.querySelectorAll(`#${part} input[type=checkbox]`)) {
    if (!box.checked) box.click();
  }
  seen[part] = positions.map((position) => {
    position.forEach((at, i) => {
      const slider = document.querySelector(`input[name=${part}-${i}]`);
      slider.value = at; slider.dispatchEvent(new Event("input"));
    });
    return look(part);
  });
}
for (const box of document.querySelectorAll("#experts input[type=checkbox]")) box.click();
seen.nothing = document.querySelectorAll("#experts figure").length;
seen.inputs = [...document.querySelectorAll("input")].map((one) =>
  [one.type, one.tabIndex, Boolean(one.labels.length), one.getAttribute("aria-valuetext")]);
"""


@pytest.fixture(scope="module")
def text() -> str:
    return page(packed(PARTS))


@pytest.fixture(scope="module")
def seen(text: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    script = f"const AT = {json.dumps(AT)};" + ACTIONS
    return seen_in_browser(text, script, tmp_path_factory.mktemp("browser"))


def words(part: Part, at: Sequence[int]) -> list[str]:
    chosen = zip(part.sliders, at, strict=True)
    return [list(slider.positions.values())[place] for slider, place in chosen]


@pytest.mark.slow
def test_the_page_needs_no_network(text: str) -> None:
    assert not re.search(r"src\s*=|https?://(?!www\.w3\.org)|@import|fetch\(|url\(", text)


def test_a_page_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2,000,000"):
        page("x" * 2_000_000)


def test_every_entry_of_both_commands_is_on_the_page() -> None:
    assert list(PIPELINE.entries) == list(schedules.ENTRIES)
    assert list(EXPERTS.entries) == list(programs.ENTRIES)
    for part in (PIPELINE, EXPERTS):
        assert set(part.drawn) <= set(part.entries)
        assert all(
            0 <= at < len(one.positions) for at, one in zip(part.first, part.sliders, strict=True)
        )


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("place", range(3))
def test_schedules_are_those_of_the_clock(seen: Mapping[str, Any], place: int) -> None:
    at = AT["pipeline"][place]
    p, m, v = (2, 4)[at[0]], (4, 8)[at[1]], (1, 2)[at[2]]
    gradients, (exchange, pairs) = (
        ((1, 1), (1.5, 0.5))[at[3]],
        ((0, False), (0.25, False), (0.25, True))[at[4]],
    )
    costs = Costs(1, *gradients, exchange=exchange, layers=8)
    job = schedules.ScheduleJob(p, v, m, costs, pairs=pairs)
    shown = seen["pipeline"][place]
    command = " ".join(["mindspeed pipeline plan", *filter(None, words(PARTS[0], at))])
    assert shown["command"] == command
    existing, steps = 0, {}
    for one in schedules.compare(job):
        cells, found = shown["rows"][one.name], one.simulation
        assert cells[-1] == one.flags
        if found is None:
            assert cells[0] == one.reason and one.name not in shown["figures"]
            continue
        existing += 1
        steps[one.name] = round(found.makespan, 6)
        assert cells[:4] == [
            str(found.plan.placement.chunks), f"{found.makespan:.6g}",
            f"{100 * found.bubble:.1f} %", f"{max(found.peak_memory):.4g}",
        ]  # fmt: skip
        figure = shown["figures"][one.name]
        assert figure["lanes"] == p
        assert figure["peaks"] == pytest.approx(found.peak_memory, abs=1e-6)
        drawn = [
            (bar["lane"], bar["title"].partition(":")[0], *times(figure, bar, found.makespan))
            for bar in figure["bars"]
        ]
        expected = [
            (rank, f"{LOOKS[action.op]}, micro-batch {action.microbatch}", start, end)
            for rank, row in enumerate(found.timeline)
            for action, start, end in row
            if end > start
        ]
        assert_same(drawn, expected, found.makespan)
    assert existing == len(shown["figures"]) >= 5
    assert shown["shortest"] == [name for name in steps if steps[name] == min(steps.values())]


LOOKS = {
    "F": "forward", "Fc": "forward, input kept", "R": "recomputation", "B": "backward",
    "I": "input gradients", "W": "weight gradients",
}  # fmt: skip


def times(figure: Mapping[str, Any], bar: Mapping[str, Any], end: float) -> tuple[float, float]:
    """Start and end of a bar, read from its place beside the one that lasts to ``end``."""
    start = (bar["start"] - figure["left"]) / figure["width"] * end
    return start, start + bar["length"] / figure["width"] * end


def assert_same(drawn: list[Any], expected: list[Any], end: float) -> None:
    """The same bars in each lane, to a thousandth of the time."""
    assert len(drawn) == len(expected)
    for one, other in zip(sorted(drawn), sorted(expected), strict=True):
        assert one[:2] == other[:2]
        assert one[2:] == pytest.approx(other[2:], abs=1e-3 * end)


@pytest.mark.slow
@needs_browser
def test_1f1b_has_the_bubble_of_the_literature(seen: Mapping[str, Any]) -> None:
    """(p - 1) / (m + p - 1), and p micro-batches in flight on the first rank."""
    shown = seen["pipeline"][0]
    assert shown["rows"]["1f1b"][2] == f"{100 * 1 / 5:.1f} %"
    assert shown["figures"]["1f1b"]["peaks"] == [2, 1]


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("place", range(2))
def test_programs_are_those_of_the_clock(seen: Mapping[str, Any], place: int) -> None:
    at, shown = AT["experts"][place], seen["experts"][place]
    parser = argparse.ArgumentParser()
    moe.add_arguments(parser)
    given = " ".join(words(PARTS[1], at))
    assert shown["command"] == " ".join(f"mindspeed moe plan {given}".split())
    job = moe.job_of(parser.parse_args(["plan", *given.split()]))
    existing = 0
    for one in programs.compare(job):
        cells, found = shown["rows"][one.name], one.simulation
        if found is None:
            assert cells[0] == one.reason and one.name not in shown["figures"]
            continue
        existing += 1
        assert cells[4:6] == [f"{found.exposed() * 1e3:.4g}", f"{found.total * 1e3:.4g}"]
        figure = shown["figures"][one.name]
        line = moe.visible(found.lanes)
        assert figure["lanes"] == len(line.full_lanes)
        drawn = sum(
            times(figure, bar, line.end)[1] - times(figure, bar, line.end)[0]
            for bar in figure["bars"]
        )
        lasting = [one for one in line.intervals if one.lane in line.lanes and one.end > one.start]
        assert len(figure["bars"]) == len(lasting)
        assert drawn == pytest.approx(
            sum(one.seconds for one in lasting), abs=1e-3 * line.end * len(lasting)
        )
    assert existing == len(shown["figures"]) >= 10
    assert seen["nothing"] == 0


@pytest.mark.slow
@needs_browser
def test_everything_can_be_reached_with_keys_and_has_a_label(seen: Mapping[str, Any]) -> None:
    inputs = seen["inputs"]
    assert {kind for kind, *_ in inputs} == {"range", "checkbox"}
    assert all(index == 0 and label for _, index, label, _ in inputs)
    assert all(said for kind, _, _, said in inputs if kind == "range")
