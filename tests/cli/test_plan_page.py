"""The page of a plan: its data, and what it does in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed.planner.interval import JobKind, interval_of
from mindspeed.planner.layout import Layout, Recompute
from mindspeed.planner.search.page import html_of
from mindspeed.planner.search.result import Candidate, Closest, SearchResult
from mindspeed.planner.time.picture import Drawn, StepPicture
from tests.cli.plan_search_job import GIB, Priced, Rank
from tests.support.browser import needs_browser, seen_in_browser


def priced(layout: Layout, seconds: float, gib: int) -> tuple[Layout, Priced]:
    ranks = tuple(Rank({"weights": GIB}, (gib - 1) * GIB) for _ in range(layout.pp))
    parts = {"computation": 0.75 * seconds, "bubble of the pipeline": 0.25 * seconds}
    return layout, Priced(seconds, gib * GIB, ranks=ranks, parts=parts)


def drawn() -> StepPicture:
    """Two pipeline ranks with two micro-batches; the first keeps them longer."""
    rows = [
        [
            ("F", 0, 0, 0.0, 0.1),
            ("F", 0, 1, 0.1, 0.2),
            ("B", 0, 0, 0.4, 0.6),
            ("B", 0, 1, 0.7, 0.9),
        ],
        [
            ("F", 1, 0, 0.1, 0.2),
            ("B", 1, 0, 0.2, 0.4),
            ("F", 1, 1, 0.4, 0.5),
            ("B", 1, 1, 0.5, 0.7),
        ],
    ]
    alive = [[2, 3, 2, 1], [2, 1, 2, 1]]
    return StepPicture(
        1.0,
        ({"weights": GIB},) * 2,
        tuple(
            tuple(
                Drawn(*one, (n + 1) * GIB, {"weights": GIB, "activations": (n - 1) * GIB})
                for one, n in zip(row, after, strict=True)
            )
            for row, after in zip(rows, alive, strict=True)
        ),
    )


BASE = Layout(16, 16, recompute=Recompute())
FAST = replace(BASE, tp=2)
TWO = priced(replace(FAST, pp=2), 1.5, 20)
LAYOUTS = (
    priced(FAST, 1.0, 40),
    (TWO[0], replace(TWO[1], picture=drawn())),
    priced(replace(BASE, tp=4, mbs=2), 2.0, 30),
    priced(replace(BASE, tp=4, pp=2, memory=("</script>",)), 3.0, 10),
)
FOUND = SearchResult(
    "h100", 16, 77 * GIB, 100, {"need more than 77 GiB": 96}, 4, 7,
    candidates=tuple(Candidate(*one) for one in LAYOUTS[:2]),
    front=tuple(Candidate(*one) for one in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[3])),
    interval=interval_of(JobKind(False, "bf16"), "h100"),
    priced=LAYOUTS,
    searched={"tp": ("1", "2", "4"), "recompute": ("none", "core_attn")},
)  # fmt: skip
NOTHING = replace(FOUND, candidates=(), front=(), priced=(), fitting=0,
                  closest=Closest(FAST, LAYOUTS[0][1], 3 * GIB))  # fmt: skip


def page() -> str:
    return html_of([("pretraining", FOUND, lambda layout: f"train {layout}"),
                    ("LoRA", NOTHING, lambda layout: "")])  # fmt: skip


def test_the_page_has_every_priced_layout_and_needs_no_network() -> None:
    text = page()
    found = re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    first, second = json.loads(found[1])
    assert [one["name"] for one in first["layouts"]] == [str(layout) for layout, _ in LAYOUTS]
    assert [one["front"] for one in first["layouts"]] == [True, True, False, True]
    assert first["dimensions"] == ["tp", "pp", "mbs", "memory"] and first["best"] == 0
    for one, (_, price) in zip(first["layouts"], LAYOUTS, strict=True):
        assert sum(one["time"].values()) == price.seconds
        assert all(sum(rank.values()) == price.peak_bytes for rank in one["ranks"])
    assert first["searched"] == FOUND.to_json()["searched"] == {
        "tp": ["1", "2", "4"], "recompute": ["none", "core_attn"],
    }  # fmt: skip
    assert "searched: recompute none, core_attn" in FOUND.counts()
    assert second["layouts"] == [] and "3.00 GiB too much" in second["nothing"]
    assert not re.search(r"(src|href)\s*=|@import|fetch\(|url\(", text)


ACTIONS = """
const row = () => document.querySelector("tr[aria-selected=true]");
const text = (id) => document.getElementById(id).textContent;
const change = (name, value) => {
  const list = document.querySelector(`select[name=${name}]`);
  list.value = value; list.dispatchEvent(new Event("change"));
};
const first = () => [...document.querySelectorAll("#rows tr td:first-child")];
const names = () => first().map((cell) => cell.textContent);
const rects = (what) => document.querySelectorAll(`#lanes rect${what}`).length;
const title = (what) => document.querySelector(what + " title").textContent;
const step = () => [byId("schedule").hidden, byId("over").hidden, byId("undrawn").hidden];
const bars = () => document.querySelectorAll("#memory rect").length;
seen.first = [row().cells[0].textContent, row().cells[2].textContent, text("command")];
seen.undrawn = step();
seen.searched = text("searched");
seen.sorted = names();
document.querySelectorAll("#head button")[6].click();
seen.byMemory = names();
document.querySelectorAll("#head button")[6].click();
seen.byMemoryDown = names();
row().dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
seen.afterArrow = [row().cells[0].textContent, document.activeElement === row()];
change("pp", "2");
seen.afterWhatIf = [row().cells[0].textContent, text("answer")];
seen.bars = bars();
seen.drawn = [step(), rects(""), rects("[data-op=F]"), title("#lanes rect")];
seen.kinds = ["weights", "activations"].map((kind) => title(`#alive polygon[data-kind=${kind}]`));
change("rank", "1");
seen.other = [title("#alive polygon[data-kind=activations]"), text("alive")];
change("tp", "4");
seen.nearest = [row().cells[0].textContent, text("answer")];
document.querySelectorAll("#front circle")[0].dispatchEvent(new Event("click"));
seen.afterPoint = [row().cells[0].textContent, text("time")];
change("plan", "1");
seen.nothing = [text("command"), document.querySelector("#front").closest("[data-found]").hidden];
"""


@needs_browser
def test_tables_sort_questions_answer_and_keys_move(tmp_path: Path) -> None:
    seen = seen_in_browser(page(), ACTIONS, tmp_path)
    fast, two, wide, small = (str(layout) for layout, _ in LAYOUTS)
    assert FOUND.interval is not None
    assert seen["first"] == [fast, two_digits(FOUND.interval), f"train {fast}"]
    assert seen["sorted"] == [fast, two, wide, small]
    assert seen["byMemory"] == [small, two, wide, fast]
    assert seen["byMemoryDown"] == [fast, wide, two, small]
    assert seen["afterArrow"] == [wide, True]
    # No layout is tp=4 pp=2 mbs=2; of two that differ equally, the faster one.
    name, answer = seen["afterWhatIf"]
    assert name == two and answer.startswith("pp 2: time -25.0 %, memory -33.3 %; no such layout")
    assert seen["searched"] == "tp1, 2, 4recomputenone, core_attn"
    assert seen["bars"] == 4  # two kinds on two ranks
    assert seen["undrawn"] == [True, True, False]
    shown, bars, forwards, what = seen["drawn"]
    assert shown == [False, False, True] and (bars, forwards) == (8 + 2, 4)
    assert what == "rank 0, forward of stage 0, micro-batch 0: 0.00 to 0.100 s"
    assert seen["kinds"] == ["weights: up to 1.00 GiB", "activations: up to 2.00 GiB"]
    assert seen["other"][0] == "activations: up to 1.00 GiB"
    assert "the most within it, 3.00 GiB" in seen["other"][1]
    name, answer = seen["nearest"]
    assert name == small and answer.startswith("tp 4: time +100.0 %, memory -50.0 %; no such")
    assert answer.endswith(small)
    assert seen["afterPoint"][0] == fast
    assert "computation 75.0 %" in seen["afterPoint"][1]
    assert "3.00 GiB too much" in seen["nothing"][0] and seen["nothing"][1]


def two_digits(interval: Any) -> str:
    return f"{interval.low:.3g} to {interval.high:.3g}"
